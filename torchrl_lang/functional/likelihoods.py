"""Terms of a loss whose token probabilities are action values (Q-SFT, arXiv 2411.05193)."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang._checks import within
from torchrl_lang.functional.filters import min_p_filter

__all__ = ["likelihood_ratio_value", "weighted_cross_entropy"]


def weighted_cross_entropy(
    log_prob: Tensor, action: Tensor, weight: Tensor, rest: int | None = None
) -> Tensor:  # [N, V], [N], [N] -> [N]
    """Cross-entropy against a target that gives ``weight`` to the taken action and what remains to others.

    ``-(w log p(a) + (1 - w) / (V - 1) sum_{b != a} log p(b))``, with the remaining mass spread evenly (Q-SFT, arXiv
    2411.05193, eq. 3), or ``-(w log p(a) + (1 - w) log p(rest))``, with an action that is never taken for all of it. If
    actions come from ``pi``, the second is least at ``p(a) = pi(a) E[w | a]``; the first adds to that ``sum_{b != a}
    pi(b) E[1 - w | b] / (V - 1)``, which is small where there are many actions.

    Args:
        log_prob: float ``[N, V]``, normalised.
        action: int64 ``[N]``.
        weight: float ``[N]``, in ``[0, 1]``.
        rest: id of the action that gets the remaining mass; None for all others alike.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import weighted_cross_entropy
        >>> log_prob = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> weighted_cross_entropy(log_prob, torch.tensor([0]), torch.tensor([1.0]))  # log 2
        tensor([0.6931])
        >>> weighted_cross_entropy(log_prob, torch.tensor([0]), torch.tensor([0.0]), rest=2)  # log 4
        tensor([1.3863])
    """
    taken = log_prob.gather(-1, action[:, None]).squeeze(-1)
    others = (log_prob.sum(-1) - taken) / (log_prob.shape[-1] - 1) if rest is None else log_prob[:, rest]
    return -(weight * taken + (1 - weight) * others)


def likelihood_ratio_value(log_prob: Tensor, log_behavior: Tensor, threshold: float = 0.0) -> Tensor:
    """Value of a state, ``max_a p(a | s) / pi(a | s)``, where ``p`` is what the weighted cross-entropy trains.

    Over the actions with ``pi(a | s) / max_b pi(b | s) >= threshold``: the ratio of an action that hardly occurs is
    that of two small numbers, and the maximum finds the worst of them.

    Args:
        log_prob: float ``[N, V]``, ``log p``.
        log_behavior: float ``[N, V]``, ``log pi``, the policy that made the data; ``-inf`` at impossible actions.
        threshold: in ``[0, 1]``; 0 takes all that are possible, as the paper does (Q-SFT, arXiv 2411.05193, eq. 3).

    Returns:
        float ``[N]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import likelihood_ratio_value
        >>> behavior = torch.tensor([[0.5, 0.49, 0.01]]).log()
        >>> p = torch.tensor([[0.1, 0.245, 0.655]]).log()
        >>> likelihood_ratio_value(p, behavior), likelihood_ratio_value(p, behavior, threshold=0.1)
        (tensor([65.5000]), tensor([0.5000]))
    """
    within("threshold", threshold, 0, 1)
    kept = min_p_filter(log_behavior, threshold) if threshold else log_behavior
    ratio = (log_prob - log_behavior).masked_fill(kept.isneginf(), -torch.inf)
    return ratio.amax(-1).exp()
