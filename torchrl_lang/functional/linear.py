"""Chunked losses of a linear layer over a vocabulary, from features to a scalar, without storing ``[N, V]`` logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_lang._checks import have_shapes
from torchrl_lang.functional.fast_linear import fast_linear
from torchrl_lang.functional.precision import upcast_half

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
        ValueError: shapes do not match.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.linear import linear_cross_entropy
        >>> features, weight = torch.eye(2), torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [0.0, 0.0]])
        >>> term = linear_cross_entropy(features, weight, None, torch.tensor([2, 0]))
        >>> term.each, term.total
        (tensor([0.1392, 1.3863]), tensor(1.5255))
    """
    return _term(_softmax_chunk, features, weight, bias, target, position_weight, temperature, chunk_size, recompute)


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
    """Compute the squared hinge ``sum_v max(0, z_v - z_target + margin)**2`` of ``z = features @ weight.T + bias``.

    ``margin_term`` without ``[N, V]``. With ``h_v`` the hinge, the gradient is
    ``dz_v = 2 h_v``, and ``-2 sum_v h_v`` is added to ``dz_target``. All other arguments and results are those of
    ``linear_cross_entropy``.
    """
    term = partial(_hinge_chunk, margin=margin)
    return _term(term, features, weight, bias, target, position_weight, 1.0, chunk_size, recompute)


@torch.compiler.disable
def _term(
    term: _ChunkTerm,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    position_weight: Tensor | None,
    temperature: Tensor | float,
    chunk_size: int | None,
    recompute: bool,
) -> LinearTerm:
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
    plan = _Plan(term, dtype, chunk_size, temperature)
    eager = torch.is_grad_enabled() and not recompute
    total, each, taken = _VocabularyTerm.apply(features, weight, bias, target, position_weight, plan, eager)
    return LinearTerm(total, each, taken) if stacked else LinearTerm(total, each[0], taken[0])


# Weights of a layer from which on products by oneDNN, which cannot write into a buffer, are the faster ones.
_FAST_WEIGHTS = 2**20
# What elementwise operations process at a time on a CPU.
_BLOCK_BYTES = 2**18
_BLOCK_ROWS = 1024

_ChunkTerm = Callable[[Tensor, Tensor, bool], Tensor]
"""Computes losses ``[c]`` of logits ``[c, V]`` and targets ``[c]``. If the flag is True, it overwrites the logits with
``d loss / d logits``."""


class _Plan(NamedTuple):
    """Options of the computation of a term."""

    term: _ChunkTerm
    dtype: torch.dtype
    """dtype of the matrix products."""
    chunk_size: int
    temperature: Tensor | float


_Gradients = list[Tensor | None]
"""Gradients of features, weight and bias, at least float32; None if not needed."""


def _scaled(grads: _Gradients, scale: Tensor) -> _Gradients:
    """Scale in place."""
    return [gradient if gradient is None else gradient.mul_(scale) for gradient in grads]


class _VocabularyTerm(torch.autograd.Function):
    """``features [n, N, F], weight [n, V, F], bias [n, V], target [N], w [N] -> total [], each and taken [n, N]``."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        position_weight: Tensor,
        plan: _Plan,
        eager: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the losses and, with ``eager``, the gradients of their weighted sum."""
        inputs = (features, weight, bias)
        kept: _Gradients = _zeros(inputs, ctx.needs_input_grad) if eager else [None, None, None]
        each, taken, scale = _evaluate(plan, *inputs, target, position_weight, kept)
        ctx.plan, ctx.kept = plan, (kept, scale) if eager else None
        ctx.save_for_backward(*inputs, target, position_weight, each)
        ctx.set_materialize_grads(False)
        return (each * position_weight).sum(), each, taken

    @staticmethod
    def backward(
        ctx: Any, grad_total: Tensor | None, grad_each: Tensor | None, grad_taken: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients; compute those of the losses of single positions."""
        if torch.is_grad_enabled():  # create_graph=True would treat the saved gradients as constants
            raise RuntimeError("Chunked losses have no second-order gradients: give logits_chunk=None.")
        features, weight, bias, target, position_weight, each = ctx.saved_tensors
        inputs, needs = (features, weight, bias), ctx.needs_input_grad
        if grad_total is not None and grad_each is None and ctx.kept is not None:
            kept, scale = ctx.kept
            ctx.kept = None  # scaled in place: a second backward pass computes them again
            grads = _scaled(kept, scale * grad_total)
        else:
            grads = _zeros(inputs, needs)
            if grad_total is not None or grad_each is not None:
                combined = torch.zeros_like(each) if grad_each is None else grad_each
                combined = combined if grad_total is None else combined + grad_total * position_weight
                _, _, scale = _evaluate(ctx.plan, *inputs, target, combined, grads)
                grads = _scaled(grads, scale)
        if grad_taken is not None:
            _add_taken(grads, features, weight, target, grad_taken)
        grad_position = None if not needs[4] or grad_total is None else grad_total * each.sum(0)
        cast = [g if x is None or g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)]
        return (*cast, None, grad_position, None, None)


def _zeros(inputs: tuple[Tensor, Tensor, Tensor | None], needs: tuple[bool, ...]) -> _Gradients:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    pairs = zip(inputs, needs[:3], strict=True)
    return [torch.zeros_like(x, dtype=wide) if needed and x is not None else None for x, needed in pairs]


def _evaluate(
    plan: _Plan,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    position_weight: Tensor,
    grads: _Gradients,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and target logits, ``[n, N]``, computed head by head and chunk by chunk.

    Writes the gradients of the weighted sum, divided by the returned scale, to ``grads``. The scale is the greatest
    magnitude of ``position_weight``, ``[N]`` or ``[n, N]``, so that a mean over many positions does not underflow in
    half precision.
    """
    heads, positions, _ = features.shape
    wide = torch.promote_types(features.dtype, torch.float32)
    scale = position_weight.abs().amax().to(wide) if positions else torch.ones((), dtype=wide, device=features.device)
    relative = position_weight.to(wide) / scale.clamp_min(torch.finfo(wide).tiny) / plan.temperature
    relative = relative.expand(heads, positions)
    each, taken = (features.new_empty((heads, positions), dtype=wide) for _ in range(2))
    fast = _fast(weight[:1], plan.dtype)
    # All chunks share one buffer, because new memory has to be mapped page by page.
    buffer = features.new_empty((0 if fast else min(plan.chunk_size, positions), weight.shape[1]), dtype=plan.dtype)
    any_gradient = any(gradient is not None for gradient in grads)
    with torch.autocast(features.device.type, enabled=False):
        for k in range(heads):
            layer = weight[k].to(plan.dtype)
            offset = None if bias is None else (bias[k] / plan.temperature).to(plan.dtype)
            head_grads = [gradient if gradient is None else gradient[k] for gradient in grads]
            for start in range(0, positions, plan.chunk_size):
                part = slice(start, min(start + plan.chunk_size, positions))
                x = features[k, part]
                scaled = (x / plan.temperature).to(plan.dtype)
                logits = fast_linear(scaled, layer) if fast else torch.mm(scaled, layer.mT, out=buffer[: x.shape[0]])
                if offset is not None:
                    logits += offset
                taken[k, part] = logits.gather(-1, target[part, None]).squeeze(-1)
                # On a CPU in blocks that fit its cache; the logits are overwritten with their gradients.
                block = max(1, _BLOCK_BYTES // (logits.shape[1] * 4)) if logits.device.type == "cpu" else positions
                blocks = zip(logits.split(block), target[part].split(block), strict=True)
                each[k, part] = torch.cat([plan.term(rows, labels, any_gradient) for rows, labels in blocks])
                _add_chunk(head_grads, part, logits, x, layer, relative[k, part])
                del blocks, logits  # before memory is taken for the next ones
    return each, taken.mul_(plan.temperature), scale


def _add_chunk(grads: _Gradients, part: slice, errors: Tensor, x: Tensor, layer: Tensor, relative: Tensor) -> None:
    """Add the gradients of one chunk. Weights multiply the features, ``[c, F]``, not the logits, ``[c, V]``."""
    (of_features, of_weight, of_bias), fast = grads, _fast(layer, layer.dtype)
    if of_features is not None:
        product = fast_linear(errors, layer.mT) if fast else errors @ layer
        torch.mul(product, relative.unsqueeze(-1), out=of_features[part])
    if of_weight is not None:
        weighted = (x * relative.unsqueeze(-1)).to(errors.dtype)
        if errors.dtype != of_weight.dtype:
            of_weight.add_(errors.mT @ weighted)
        elif fast:  # in blocks, whose products stay in the cache until they are added
            for block, own in zip(of_weight.split(_BLOCK_ROWS), errors.split(_BLOCK_ROWS, -1), strict=True):
                block.add_(fast_linear(own.mT, weighted.mT))
        else:
            of_weight.addmm_(errors.mT, weighted)
    if of_bias is not None:
        of_bias.add_(errors.mT @ relative.to(errors.dtype))


def _fast(layer: Tensor, dtype: torch.dtype) -> bool:
    """Whether products with a layer in this dtype are by oneDNN, and large enough to be worth new memory."""
    return layer.is_cpu and dtype == torch.float32 and layer.numel() >= _FAST_WEIGHTS


def _add_taken(grads: _Gradients, features: Tensor, weight: Tensor, target: Tensor, grad_taken: Tensor) -> None:
    """Add the gradients of ``z_target = features . weight[target] + bias[target]``."""
    of_features, of_weight, of_bias = grads
    for k, grad in enumerate(grad_taken):
        if of_features is not None:
            of_features[k].addcmul_(grad.unsqueeze(-1), weight[k, target].to(grad.dtype))
        if of_weight is not None:
            of_weight[k].index_add_(0, target, grad.unsqueeze(-1) * features[k])
        if of_bias is not None:
            of_bias[k].index_add_(0, target, grad)


def _softmax_chunk(logits: Tensor, target: Tensor, gradient: bool) -> Tensor:
    """Cross-entropy, a :data:`_ChunkTerm`."""
    log_prob = torch.log_softmax(upcast_half(logits), -1)
    index = target.unsqueeze(-1)
    losses = -log_prob.gather(-1, index).squeeze(-1)
    if gradient:
        torch.exp(log_prob, out=logits)
        logits.scatter_(-1, index, (-losses).expm1().unsqueeze(-1).to(logits.dtype))  # p - 1, without cancellation
    return losses


def _hinge_chunk(logits: Tensor, target: Tensor, gradient: bool, *, margin: float) -> Tensor:
    """Sum of squared hinges, a :data:`_ChunkTerm` for a given ``margin``."""
    index = target.unsqueeze(-1)
    wide = upcast_half(logits)
    hinge = (wide - (wide.gather(-1, index) - margin)).clamp_min_(0)
    losses = hinge.square().sum(-1)
    if gradient:
        through_target = 2 * (hinge.gather(-1, index) - hinge.sum(-1, keepdim=True))
        torch.mul(hinge, 2, out=logits)
        logits.scatter_(-1, index, through_target.to(logits.dtype))
    return losses
