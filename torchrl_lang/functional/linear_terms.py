"""Chunked losses of a linear layer over a vocabulary, from features to a scalar, without storing ``[N, V]`` logits."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one, have_shapes
from torchrl_lang.functional.chunked_linear import ChunkTerm, Plan, VocabularyTerm, hinge_chunk, softmax_chunk
from torchrl_lang.functional.precision import upcast_half

__all__ = ["LinearTerm", "linear_cross_entropy", "linear_margin"]

# Bytes of one chunk of logits, and the fewest positions of a chunk: each chunk adds to the whole gradient of the weight
# once, which must be cheap compared with the matrix products.
_CHUNK_BYTES = 48 * 2**20
_LEAST_POSITIONS = 128


class LinearTerm(NamedTuple):
    """A loss over a vocabulary, summed and per position."""

    total: Tensor
    """Scalar: the weighted sum over positions and heads. Its gradients are computed in the forward pass."""
    each: Tensor
    """``[N]`` or ``[n, N]``, unweighted. A gradient through it computes the logits again, chunk by chunk."""
    taken: Tensor
    """``[N]`` or ``[n, N]``, the target's logit ``z_j[target_j]``. A gradient through it is added to that of ``total``
    and needs no logits."""


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    position_weight: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    chunk_size: int | None = None,
    recompute: bool = False,
) -> LinearTerm:
    """Cross-entropy of ``softmax((features @ weight.T + bias) / T)`` against ``target``, without ``[N, V]``.

    ``each_j = logsumexp(z_j) - z_j[target_j]`` and ``total = sum_j w_j each_j``. With ``n`` stacked heads it is the
    term of CQL (arXiv 2006.04779, eq. 4; :func:`~torchrl_lang.functional.cql_term`), summed over the heads.

    The gradients of ``total`` are computed in the forward pass together with each chunk of logits, and scaled in the
    backward pass: one matrix product forward and two backward, no recomputation, and one chunk of logits in memory
    beside the gradients. They equal the gradients of the unchunked loss. The weight's gradient is summed in at least
    float32. Under autocast the products use its precision. There are no second-order gradients.

    Args:
        features: float ``[N, F]``, or ``[n, N, F]`` for ``n`` heads.
        weight: float ``[V, F]``, or ``[n, V, F]``.
        bias: float ``[V]``, or ``[n, V]``; None for no bias.
        target: int64 ``[N]``.
        position_weight: float ``[N]``, ``w``; None for 1.
        temperature: ``T > 0``; gets no gradient.
        chunk_size: positions per chunk; by default a few dozen megabytes of logits.
        recompute: compute all gradients in the backward pass, which computes the logits again. Use it for losses of
            ``each``, which do not use the gradients of ``total``.

    Returns:
        ``total``, ``each`` and ``taken``, at least float32.

    Raises:
        ValueError: shapes do not match, or ``chunk_size`` is below 1.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import linear_cross_entropy
        >>> features, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
        >>> term = linear_cross_entropy(features, weight, None, torch.tensor([2, 0]))
        >>> term.each, term.total
        (tensor([0.1392, 1.3863]), tensor(1.5255))
    """
    return _term(softmax_chunk, features, weight, bias, target, position_weight, temperature, chunk_size, recompute)


def linear_margin(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    margin: float = 0.0,
    position_weight: Tensor | None = None,
    chunk_size: int | None = None,
    recompute: bool = False,
) -> LinearTerm:
    """Squared hinge ``sum_v max(0, z_v - z_target + margin)**2`` of ``z = features @ weight.T + bias``.

    :func:`~torchrl_lang.functional.margin_term` without ``[N, V]``. With ``h_v`` the hinge, the gradient is
    ``dz_v = 2 h_v``, and ``-2 sum_v h_v`` is added to ``dz_target``. ``margin`` is the desired lead of the target's
    logit; all other arguments, results and errors are those of :func:`linear_cross_entropy`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import linear_margin
        >>> linear_margin(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [0.0]]), None, torch.tensor([0])).total
        tensor(4.)
    """
    term = partial(hinge_chunk, margin=margin)
    return _term(term, features, weight, bias, target, position_weight, 1.0, chunk_size, recompute)


@torch.compiler.disable
def _term(
    term: ChunkTerm,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    position_weight: Tensor | None,
    temperature: Tensor | float,
    chunk_size: int | None,
    recompute: bool,
) -> LinearTerm:
    if chunk_size is not None:
        at_least_one("chunk_size", chunk_size)
    if features.ndim not in (2, 3):
        raise ValueError(f"features must have shape [N, F] or [n, N, F], got {list(features.shape)}: flatten it first.")
    (*heads, positions, width), vocabulary = features.shape, weight.shape[-2] if weight.ndim > 1 else 0
    have_shapes(
        ("weight", weight, (*heads, vocabulary, width)),
        ("bias", bias, (*heads, vocabulary)),
        ("target", target, (positions,)),
        ("position_weight", position_weight, (positions,)),
    )
    stacked = features.ndim == 3
    if not stacked:
        features, weight, bias = features[None], weight[None], None if bias is None else bias[None]
    if position_weight is None:
        position_weight = upcast_half(features).new_ones(target.shape)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    if chunk_size is None:
        chunk_size = max(_LEAST_POSITIONS, _CHUNK_BYTES // (weight.shape[1] * dtype.itemsize))
    plan = Plan(term, dtype, chunk_size, temperature)
    eager = torch.is_grad_enabled() and not recompute
    total, each, taken = VocabularyTerm.apply(features, weight, bias, target, position_weight, plan, eager)
    return LinearTerm(total, each, taken) if stacked else LinearTerm(total, each[0], taken[0])
