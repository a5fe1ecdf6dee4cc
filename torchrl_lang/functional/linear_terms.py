"""Losses of a linear layer over a vocabulary, from features to a scalar, in pieces: no ``[N, V]`` is ever held."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.functional.chunked_linear import PieceTerm, Plan, VocabularyTerm, hinge_piece, softmax_piece
from torchrl_lang.functional.precision import upcast_half

__all__ = ["LinearTerm", "linear_cross_entropy", "linear_margin"]

# Bytes of the one piece of logits that exists at a time, but no fewer positions than this: each piece adds to the whole
# gradient of the weight once, which has to be small beside the products.
_PIECE_BYTES = 48 * 2**20
_LEAST_POSITIONS = 128


class LinearTerm(NamedTuple):
    """A term over a vocabulary, reduced and not."""

    total: Tensor
    """Scalar, the weighted sum over positions and heads. Its gradients were computed with it."""
    each: Tensor
    """``[N]`` or ``[n, N]``, unweighted. A gradient through it computes the logits a second time, piece by piece."""
    taken: Tensor
    """``[N]`` or ``[n, N]``, the target's own ``z_j[target_j]``. A gradient through it joins that of ``total``: it
    needs no logits, and the weight's gradient is still one tensor."""


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

    The gradients of ``total`` are computed in the forward pass, while a piece of the logits is at hand, and scaled in
    the backward pass: one product forward and two backward, nothing twice, and in memory one piece of logits beside
    the gradients themselves. They equal those of the plain form. The weight's gradient is summed in at least float32.
    Under autocast the products run in its precision. Gradients of gradients raise.

    Args:
        features: float ``[N, F]``, or ``[n, N, F]`` for ``n`` heads.
        weight: float ``[V, F]``, or ``[n, V, F]``.
        bias: float ``[V]``, or ``[n, V]``; None for none.
        target: int64 ``[N]``.
        position_weight: float ``[N]``, ``w``; None for 1.
        temperature: ``T > 0``. No gradient flows into it.
        chunk_size: positions a piece; by default as many as make a few dozen megabytes.
        recompute: leave all gradients to the backward pass, which then computes the logits once more. For a loss made
            of ``each``, which would not use the gradients of ``total``.

    Returns:
        ``total``, ``each`` and ``taken``, at least float32.

    Raises:
        ValueError: shapes that do not fit, or a ``chunk_size`` below 1.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import linear_cross_entropy
        >>> features, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
        >>> term = linear_cross_entropy(features, weight, None, torch.tensor([2, 0]))
        >>> term.each, term.total
        (tensor([0.1392, 1.3863]), tensor(1.5255))
    """
    return _term(softmax_piece, features, weight, bias, target, position_weight, temperature, chunk_size, recompute)


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
    ``dz_v = 2 h_v`` and, through the target's own value, ``dz_target = -2 sum_v h_v`` besides. All else is as in
    :func:`linear_cross_entropy`.

    Args:
        features: float ``[N, F]``, or ``[n, N, F]`` for ``n`` heads.
        weight: float ``[V, F]``, or ``[n, V, F]``.
        bias: float ``[V]``, or ``[n, V]``; None for none.
        target: int64 ``[N]``.
        margin: by how much the target should lead.
        position_weight: float ``[N]``; None for 1.
        chunk_size: positions a piece.
        recompute: leave all gradients to the backward pass.

    Returns:
        ``total``, ``each`` and ``taken``, at least float32.

    Raises:
        ValueError: shapes that do not fit, or a ``chunk_size`` below 1.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import linear_margin
        >>> linear_margin(torch.ones(1, 1), torch.tensor([[1.0], [3.0], [0.0]]), None, torch.tensor([0])).total
        tensor(4.)
    """
    term = partial(hinge_piece, margin=margin)
    return _term(term, features, weight, bias, target, position_weight, 1.0, chunk_size, recompute)


@torch.compiler.disable
def _term(
    term: PieceTerm,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    position_weight: Tensor | None,
    temperature: Tensor | float,
    chunk_size: int | None,
    recompute: bool,
) -> LinearTerm:
    _check(features, weight, bias, target, position_weight, chunk_size)
    stacked = features.ndim == 3
    if not stacked:
        features, weight, bias = features[None], weight[None], None if bias is None else bias[None]
    if position_weight is None:
        position_weight = upcast_half(features).new_ones(target.shape)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
    device = features.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
    plan = Plan(term, dtype, chunk_size or _positions(weight.shape[1], dtype), temperature)
    eager = torch.is_grad_enabled() and not recompute
    total, each, taken = VocabularyTerm.apply(features, weight, bias, target, position_weight, plan, eager)
    return LinearTerm(total, each, taken) if stacked else LinearTerm(total, each[0], taken[0])


def _positions(vocabulary: int, dtype: torch.dtype) -> int:
    """Positions of a piece."""
    return max(_LEAST_POSITIONS, _PIECE_BYTES // (vocabulary * dtype.itemsize))


def _check(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    position_weight: Tensor | None,
    chunk_size: int | None,
) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    if features.ndim not in (2, 3):
        raise ValueError(f"features must have shape [N, F] or [n, N, F], got {list(features.shape)}: flatten it first.")
    heads, positions, width = features.shape[:-2], features.shape[-2], features.shape[-1]
    vocabulary = weight.shape[-2] if weight.ndim > 1 else 0
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("weight", weight, (*heads, vocabulary, width)),
        ("bias", bias, (*heads, vocabulary)),
        ("target", target, (positions,)),
        ("position_weight", position_weight, (positions,)),
    ]
    for name, given, shape in expected:
        if given is not None and given.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}.")
