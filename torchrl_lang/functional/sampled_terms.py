"""Cross-entropy over a vocabulary estimated from a few sampled tokens: cheaper than exact, and biased."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang.functional.linear_terms import LinearTerm
from torchrl_lang.functional.precision import widened

__all__ = ["sampled_cross_entropy", "systematic_sample"]


def systematic_sample(probability: Tensor, m: int, start: Tensor | float) -> tuple[Tensor, Tensor]:
    """Draw ``m`` distinct tokens, likely ones more often, and say how often each would be among them.

    Systematic sampling with unequal probabilities (Madow 1949). Token ``v`` is drawn with the probability ``pi_v =
    min(1, c q_v)``, ``c`` such that they sum to ``m``: what is likely enough is drawn for certain. With the weights ``1
    / pi_v`` the sum of anything over the sample is an unbiased estimate of its sum over the vocabulary; with ``m >= V``
    it is that sum.

    Args:
        probability: ``q``, float ``[V]``, all above zero, else what is never drawn is missing; any scale.
        m: how many.
        start: in ``[0, 1)``, the one random number of a sample, a scalar.

    Returns:
        The tokens, int64 ``[min(m, V)]``, and the logarithms of their weights, ``-log pi``, at least float32.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import systematic_sample
        >>> tokens, log_weight = systematic_sample(torch.tensor([0.1, 0.1, 0.6, 0.1, 0.1]), 3, 0.25)
        >>> tokens, log_weight.exp()  # the third for certain, each of the others every second time
        (tensor([0, 2, 3]), tensor([2., 1., 2.]))
    """
    vocabulary = probability.shape[0]
    if m >= vocabulary:
        return torch.arange(vocabulary, device=probability.device), widened(torch.zeros_like(probability))
    inclusion = _inclusion(probability.double(), m)
    points = start + torch.arange(m, device=probability.device, dtype=torch.float64)
    tokens = torch.searchsorted(inclusion.cumsum(0), points, right=True).clamp_max(vocabulary - 1)
    return tokens, -inclusion[tokens].log().to(torch.promote_types(probability.dtype, torch.float32))


def _inclusion(probability: Tensor, m: int) -> Tensor:
    """``min(1, c q)`` that sums to ``m < V``."""
    q = probability / probability.sum()
    top, likeliest = q.topk(m)
    others = q.index_fill(0, likeliest, 0).sum()
    # Beside the i likeliest, summed from the least on: a difference from 1 would lose all of a small rest.
    left = (top.flip(0).cumsum(0).flip(0) + others).clamp_min(torch.finfo(q.dtype).tiny)
    scale = torch.arange(m, 0, -1, device=q.device) / left  # of the others, if those i are certain
    enough = scale * top <= 1
    enough[-1] = True
    return (q * scale[enough.int().argmax()]).clamp_max(1)


def sampled_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    negatives: Tensor,
    *,
    log_weight: Tensor | None = None,
    temperature: Tensor | float = 1.0,
) -> LinearTerm:
    """Estimate of :func:`~torchrl_lang.functional.linear_cross_entropy` of stacked heads from sampled negatives.

    With ``z = (features @ weight.T + bias) / T`` and the ``m`` negatives that are not the target of a position::

        each = log(exp(z_target) + sum_i w_i exp(z_i)) - z_target

    where ``w = (V - 1) / m`` for uniform negatives, else what :func:`systematic_sample` gives for a proposal (Bengio
    and Senécal 2008; arXiv 1412.2007, sec. 3). The sum is an unbiased estimate of the partition function; its logarithm
    is not: by Jensen's inequality the term is too small on average, by about ``Var / (2 Z**2)`` of the estimate, which
    falls as ``1 / m``. Uniform negatives are worst where a few tokens that are seldom drawn hold most of the mass; a
    proposal that finds those needs far fewer, and one that misses them more. A position of which every negative is the
    target has the term 0.

    Args:
        features: float ``[n, N, F]``.
        weight: float ``[n, V, F]``; only the rows of targets and negatives are read.
        bias: float ``[n, V]``; None for none.
        target: int64 ``[N]``.
        negatives: int64 ``[m]``, the same for all positions: drawn uniformly from ``V`` with replacement; or, with
            ``log_weight``, without.
        log_weight: float ``[m]``, logarithm of each negative's inverse probability of being drawn; None for uniform.
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
    if log_weight is None:
        others = (~is_target).sum(-1).clamp_min(1).to(taken.dtype)
        correction = ((weight.shape[1] - 1) / others).log().unsqueeze(-1)  # [N, 1]
    else:
        correction = log_weight.to(taken.dtype)  # [m]
    logits = (logits / temperature + correction).masked_fill(is_target, -torch.inf)
    own = taken / temperature
    each = torch.cat([own.unsqueeze(-1), logits], -1).logsumexp(-1) - own
    return LinearTerm(each.sum(), each, taken)
