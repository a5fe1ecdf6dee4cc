"""Cross-entropy over a vocabulary estimated from a few sampled tokens: cheaper than exact, and biased."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang.functional.linear_terms import LinearTerm
from torchrl_lang.functional.precision import widened

__all__ = ["sampled_cross_entropy"]


def sampled_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    negatives: Tensor,
    *,
    temperature: Tensor | float = 1.0,
) -> LinearTerm:
    """Estimate of :func:`~torchrl_lang.functional.linear_cross_entropy` of stacked heads from uniform negatives.

    With ``z = (features @ weight.T + bias) / T`` and the ``m`` negatives that are not the target of a position::

        each = log(exp(z_target) + (V - 1) / m * sum_i exp(z_i)) - z_target

    The sum is an unbiased estimate of the partition function (importance weight ``(V - 1) / m``); its logarithm is not:
    by Jensen's inequality the term is too small on average, by about ``Var / (2 Z**2)`` of the estimate, which falls as
    ``1 / m``. It is worst where a few tokens that are seldom drawn hold most of the mass. A position of which every
    negative is the target has the term 0.

    Args:
        features: float ``[n, N, F]``.
        weight: float ``[n, V, F]``; only the rows of targets and negatives are read.
        bias: float ``[n, V]``; None for none.
        target: int64 ``[N]``.
        negatives: int64 ``[m]``, drawn uniformly from ``V`` with replacement, the same for all positions.
        temperature: ``T > 0``.

    Returns:
        ``total``, ``each`` and ``taken`` (before division by ``T``), at least float32.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.sampled_terms import sampled_cross_entropy
        >>> features, weight, target = torch.ones(1, 1, 2), torch.zeros(1, 1000, 2), torch.tensor([5])
        >>> term = sampled_cross_entropy(features, weight, None, target, torch.tensor([7, 5, 900]))
        >>> term.each, torch.tensor(1000.0).log()  # where all are equal the estimate is exact
        (tensor([[6.9078]]), tensor(6.9078))
    """
    m = negatives.shape[0]
    index = torch.cat([negatives, target])  # read together, so that the weight gets one gradient
    rows = weight.index_select(1, index)
    logits = features @ rows[:, :m].mT  # [n, N, m]
    taken = (features * rows[:, m:]).sum(-1)  # [n, N]
    if bias is not None:
        offset = bias.index_select(1, index)
        logits = logits + offset[:, :m].unsqueeze(1)
        taken = taken + offset[:, m:]
    logits, taken = widened(logits), widened(taken)
    is_target = negatives == target.unsqueeze(-1)  # [N, m]
    others = (~is_target).sum(-1).clamp_min(1).to(taken.dtype)
    correction = ((weight.shape[1] - 1) / others).log().unsqueeze(-1)  # [N, 1]
    logits = (logits / temperature + correction).masked_fill(is_target, -torch.inf)
    own = taken / temperature
    each = torch.cat([own.unsqueeze(-1), logits], -1).logsumexp(-1) - own
    return LinearTerm(each.sum(), each, taken)
