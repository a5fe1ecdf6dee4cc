"""Terms and targets of losses over action values (ILQL, CQL, BCQ, Q-SFT), for tensors with one decision per row."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang import _ranks
from torchrl_lang._checks import check_options
from torchrl_lang.functional.filters import filtered
from torchrl_lang.functional.precision import scalar_like

_ROUNDING = 8  # units in the last place that a mean of equal numbers may differ from them


def expectile_loss(error: Tensor, expectile: Tensor | float) -> Tensor:
    """Asymmetric squared error ``|tau - 1(u < 0)| * u**2``, elementwise (IQL, arXiv 2110.06169, eq. 4).

    Args:
        error: ``u = target - estimate``, float, any shape.
        expectile: ``tau`` in ``(0, 1)``; 0.5 is half the squared error.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import expectile_loss
        >>> expectile_loss(torch.tensor([2.0, -2.0]), 0.75)
        tensor([3., 1.])
    """
    tau = scalar_like(expectile, error)
    return torch.where(error >= 0, tau, 1 - tau) * error.square()


def cql_term(action_value: Tensor, action: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Conservative term ``logsumexp(Q / T) - Q_a / T``: cross-entropy of ``Q`` against the taken action.

    The regulariser of CQL (arXiv 2006.04779, eq. 4) for one action per decision, as ILQL uses it.

    Args:
        action_value: float ``[N, n_q, V]``.
        action: int64 ``[N]``.
        temperature: ``T > 0``.

    Returns:
        float ``[N, n_q]``, never negative.

    Raises:
        ValueError: ``action_value`` has no axis of heads.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import cql_term
        >>> cql_term(torch.zeros(1, 2, 4), torch.tensor([3]))  # log 4 for each head
        tensor([[1.3863, 1.3863]])
    """
    n, heads, vocabulary = _with_heads(action_value).shape
    logits = (action_value / temperature).reshape(n * heads, vocabulary)
    return F.cross_entropy(logits, action.repeat_interleave(heads), reduction="none").reshape(n, heads)


def bcq_value(target: Tensor, action_value: Tensor, log_prob: Tensor, threshold: float) -> Tensor:
    """Value of a state in discrete BCQ: the target's value of the best action that the data support.

    ``Qt(s, argmax Q(s, a))`` over the actions with ``pi(a | s) / max_b pi(b | s) >= threshold`` (arXiv 1910.01708,
    eq. 2 and algorithm 1; the paper's inequality is strict, which at 1 would leave no action). With ``threshold=0`` it
    is that of double Q-learning (arXiv 1509.06461), with 1 the value of the most likely action.

    Args:
        target: float ``[N, V]``, ``Qt``, which values the action.
        action_value: float ``[N, V]``, ``Q``, which chooses it.
        log_prob: float ``[N, V]``, ``log pi``, or logits; actions at ``-inf`` are never chosen.
        threshold: in ``[0, 1]``.

    Returns:
        float ``[N]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.value_terms import bcq_value
        >>> target, chooses = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 5.0, 9.0]])
        >>> log_prob = torch.tensor([[0.6, 0.3, 0.1]]).log()
        >>> [bcq_value(target, chooses, log_prob, threshold).item() for threshold in (0.0, 0.4, 1.0)]
        [3.0, 2.0, 1.0]
    """
    best = filtered(action_value, log_prob, threshold).argmax(-1, keepdim=True)
    return target.gather(-1, best).squeeze(-1)


def sampled_cql_term(candidate_value: Tensor, candidate_log_prob: Tensor, value: Tensor) -> Tensor:
    """Compute the conservative term over sampled actions, ``log(1/C sum_c exp(Q_c) / pi(c)) - Q``, ``[N, n_q]``.

    The sum is an unbiased estimate of that of ``exp(Q)`` over all actions (CQL, arXiv 2006.04779, app. F), for too many
    actions to enumerate. The division by ``C`` is outside the exponents. ``candidate_value`` is ``[N, C, n_q]``, its
    log-probability ``[N, C]``, and ``value``, of the taken action, ``[N, n_q]``.
    """
    weighted = candidate_value - candidate_log_prob.unsqueeze(-1)
    return weighted.logsumexp(1) - math.log(candidate_log_prob.shape[-1]) - value


def margin_term(action_value: Tensor, action: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Squared hinge ``sum_v max(0, Q_v - Q_a + margin)**2`` over the vocabulary, the taken action included.

    Args:
        action_value: float ``[N, n_q, V]``.
        action: int64 ``[N]``.
        margin: desired lead of the taken action.

    Returns:
        float ``[N, n_q]``.

    Raises:
        ValueError: ``action_value`` has no axis of heads.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.value_terms import margin_term
        >>> margin_term(torch.tensor([[[1.0, 3.0, 0.0]]]), torch.tensor([0]))
        tensor([[4.]])
    """
    index = action[:, None, None].expand(-1, _with_heads(action_value).shape[1], 1)
    taken = action_value.gather(-1, index)
    return (action_value - taken + margin).clamp_min(0).square().sum(-1)


def _with_heads(action_value: Tensor) -> Tensor:
    if action_value.ndim != 3:
        got = f"got {list(action_value.shape)}: give the values of one head an axis of heads, action_value.unsqueeze(1)"
        raise ValueError(f"action_value must be [N, n_q, V], {got}.")
    return action_value


def advantage_weight(
    advantage: Tensor, temperature: Tensor | float, weighting: Literal["exp", "sign"] = "exp", clip: float | None = None
) -> Tensor:
    """Weight of an action in the policy's loss, from its advantage ``A = Q - V``.

    ``"exp"``: ``exp(beta * A)`` (AWAC, arXiv 2006.09359); ``"sign"``: ``beta`` where ``A > 0``, else ``1 - beta``.

    Args:
        advantage: float, any shape.
        temperature: ``beta``. Zero with ``"exp"`` gives every action the weight 1.
        weighting: ``"exp"`` or ``"sign"``.
        clip: upper bound of the weight.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import advantage_weight
        >>> advantage_weight(torch.tensor([0.0, 2.0]), 1.0, clip=5.0)
        tensor([1., 5.])
        >>> advantage_weight(torch.tensor([-1.0, 2.0]), 0.75, "sign")
        tensor([0.2500, 0.7500])
    """
    check_options(weighting=(weighting, ("exp", "sign")))
    if weighting == "exp":
        # An infinite weight would make all gradients of a batch NaN: the exponent is clamped so that even squared
        # weights are finite.
        limits = torch.finfo(advantage.dtype)
        bound = math.log(limits.max) / 2 * (1 - 4 * limits.eps)  # reduced by what rounding may add
        weight = (temperature * advantage).clamp_max(bound).exp()
    else:
        beta = scalar_like(temperature, advantage)
        weight = torch.where(advantage > 0, beta, 1 - beta)
    return weight if clip is None else weight.clamp_max(clip)


def divisor(counted: Tensor) -> Tensor:
    """The number of entries that count, at least 1, by which a sum over them becomes a mean.

    Where processes share a batch it is the mean of their numbers, so that the mean of what each divides by it is the
    mean over all entries of the batch.

    Args:
        counted: bool or numbers, any shape; the number is their sum.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.value_terms import divisor
        >>> divisor(torch.tensor([True, False, True]))
        tensor(2)
    """
    number = counted.sum()
    return _ranks.total(number).clamp_min(1) / _ranks.size() if _ranks.shares_batch() else number.clamp_min(1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions where ``mask`` is True; 0 if there are none. Masked values may even be NaN.

    Where processes share a batch it is the mean over all of it, without gradients.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.value_terms import masked_mean
        >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    return _ranks.total(torch.where(mask, values, 0).sum()) / _ranks.total(mask.sum()).clamp_min(1)


def explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """``1 - Var(target - value) / Var(target)`` where ``mask`` is True; 0 where the targets do not vary.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.value_terms import explained_variance
        >>> target, mask = torch.tensor([0.0, 2.0, torch.nan]), torch.tensor([True, True, False])
        >>> explained_variance(torch.tensor([5.0, 6.0, 0.0]), target, mask)  # a constant error costs nothing
        tensor(0.7500)
    """
    rest, whole = (masked_mean((x - masked_mean(x, mask)).square(), mask) for x in (target - value, target))
    least = (_ROUNDING * torch.finfo(whole.dtype).eps) ** 2 * masked_mean(target.square(), mask)
    return torch.where(whole > least, 1 - rest / whole.clamp_min(torch.finfo(whole.dtype).tiny), 0.0)


def weighted_cross_entropy(
    log_prob: Tensor, action: Tensor, weight: Tensor, rest: int | None = None
) -> Tensor:  # [N, V], [N], [N] -> [N]
    """Compute the cross-entropy against a target of ``weight`` at the taken action and the rest at others.

    ``-(w log p(a) + (1 - w) / (V - 1) sum_{b != a} log p(b))``, with the remaining mass spread evenly (Q-SFT, arXiv
    2411.05193, eq. 3), or ``-(w log p(a) + (1 - w) log p(rest))``, with an action that is never taken for all of it. If
    actions come from ``pi``, the second is least at ``p(a) = pi(a) E[w | a]``; the first adds to that ``sum_{b != a}
    pi(b) E[1 - w | b] / (V - 1)``, which is small where there are many actions.
    """
    taken = log_prob.gather(-1, action[:, None]).squeeze(-1)
    others = (log_prob.sum(-1) - taken) / (log_prob.shape[-1] - 1) if rest is None else log_prob[:, rest]
    return -(weight * taken + (1 - weight) * others)


def likelihood_ratio_value(log_prob: Tensor, log_behavior: Tensor, threshold: float = 0.0) -> Tensor:
    """Compute a state's value ``max_a p(a | s) / pi(a | s)``, where ``p`` is what the weighted cross-entropy trains.

    Over the actions with ``pi(a | s) / max_b pi(b | s) >= threshold``: the ratio of an action that hardly occurs is
    that of two small numbers, and the maximum finds the worst of them. A threshold of 0 takes all that are possible, as
    the paper does (Q-SFT, arXiv 2411.05193, eq. 3). Both ``[N, V]``; ``log pi`` is ``-inf`` at impossible actions.
    """
    return filtered(log_prob - log_behavior, log_behavior, threshold).amax(-1).exp()
