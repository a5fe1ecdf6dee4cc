"""Chunked losses of a linear layer over a vocabulary, with gradients computed together with each chunk of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_lang.functional.precision import upcast_half

__all__ = ["ChunkTerm", "Plan", "VocabularyTerm", "hinge_chunk", "softmax_chunk"]

# On a CPU, elementwise operations process a chunk in blocks that fit its cache.
_BLOCK_BYTES = 2**18

ChunkTerm = Callable[[Tensor, Tensor, bool], Tensor]
"""Computes losses ``[c]`` of logits ``[c, V]`` and targets ``[c]``. If the flag is True, it overwrites the logits with
``d loss / d logits``."""


class Plan(NamedTuple):
    """Options of the computation of a term."""

    term: ChunkTerm
    dtype: torch.dtype
    """dtype of the matrix products."""
    chunk_size: int
    temperature: Tensor | float


class _Gradients(NamedTuple):
    """Gradients, at least float32; None if not needed."""

    features: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def scaled(self, scale: Tensor) -> _Gradients:
        """Scale in place."""
        return _Gradients(*(gradient if gradient is None else gradient.mul_(scale) for gradient in self))


class VocabularyTerm(torch.autograd.Function):
    """``features [n, N, F], weight [n, V, F], bias [n, V], target [N], w [N] -> total [], each and taken [n, N]``."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        position_weight: Tensor,
        plan: Plan,
        eager: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the losses and, with ``eager``, the gradients of their weighted sum."""
        inputs = (features, weight, bias)
        kept = _zeros(inputs, ctx.needs_input_grad) if eager else _NO_GRADIENTS
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
            raise RuntimeError(
                "Chunked losses over a vocabulary have no second-order gradients: use cql_term or margin_term on the "
                "full logits (logits_chunk=None in a loss), or backward without create_graph."
            )
        features, weight, bias, target, position_weight, each = ctx.saved_tensors
        inputs, needs = (features, weight, bias), ctx.needs_input_grad
        if grad_total is not None and grad_each is None and ctx.kept is not None:
            kept, scale = ctx.kept
            ctx.kept = None  # scaled in place: a second backward pass computes them again
            grads = kept.scaled(scale * grad_total)
        else:
            grads = _zeros(inputs, needs)
            if grad_total is not None or grad_each is not None:
                combined = torch.zeros_like(each) if grad_each is None else grad_each
                combined = combined if grad_total is None else combined + grad_total * position_weight
                _, _, scale = _evaluate(ctx.plan, *inputs, target, combined, grads)
                grads = grads.scaled(scale)
        if grad_taken is not None:
            _add_taken(grads, features, weight, target, grad_taken)
        grad_position = None if not needs[4] or grad_total is None else grad_total * each.sum(0)
        cast = [
            gradient if x is None or gradient is None else gradient.to(x.dtype)
            for gradient, x in zip(grads, inputs, strict=True)
        ]
        return (*cast, None, grad_position, None, None)


_NO_GRADIENTS = _Gradients(None, None, None)


def _zeros(inputs: tuple[Tensor, Tensor, Tensor | None], needs: tuple[bool, ...]) -> _Gradients:
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    pairs = zip(inputs, needs[:3], strict=True)
    return _Gradients(*(torch.zeros_like(x, dtype=wide) if needed and x is not None else None for x, needed in pairs))


def _evaluate(
    plan: Plan,
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
    # All chunks share one buffer, because new memory has to be mapped page by page.
    buffer = features.new_empty((min(plan.chunk_size, positions), weight.shape[1]), dtype=plan.dtype)
    any_gradient = any(gradient is not None for gradient in grads)
    with torch.autocast(features.device.type, enabled=False):
        for k in range(heads):
            layer = weight[k].to(plan.dtype)
            offset = None if bias is None else (bias[k] / plan.temperature).to(plan.dtype)
            head_grads = _Gradients(*(gradient if gradient is None else gradient[k] for gradient in grads))
            for start in range(0, positions, plan.chunk_size):
                part = slice(start, min(start + plan.chunk_size, positions))
                x = features[k, part]
                logits = buffer[: x.shape[0]]
                torch.mm((x / plan.temperature).to(plan.dtype), layer.mT, out=logits)
                if offset is not None:
                    logits += offset
                taken[k, part] = logits.gather(-1, target[part, None]).squeeze(-1)
                each[k, part] = _apply(plan.term, logits, target[part], any_gradient)
                _add_chunk(head_grads, part, logits, x, layer, relative[k, part])
    return each, taken.mul_(plan.temperature), scale


def _apply(term: ChunkTerm, logits: Tensor, target: Tensor, gradient: bool) -> Tensor:
    """Losses ``[c]``; overwrites ``logits`` with their gradients."""
    if logits.device.type != "cpu":
        return term(logits, target, gradient)
    block = max(1, _BLOCK_BYTES // (logits.shape[1] * 4))
    blocks = zip(logits.split(block), target.split(block), strict=True)
    return torch.cat([term(rows, labels, gradient) for rows, labels in blocks])


def _add_chunk(grads: _Gradients, part: slice, errors: Tensor, x: Tensor, layer: Tensor, relative: Tensor) -> None:
    """Add the gradients of one chunk. Weights multiply the features, ``[c, F]``, not the logits, ``[c, V]``."""
    if grads.features is not None:
        torch.mul(errors @ layer, relative.unsqueeze(-1), out=grads.features[part])
    if grads.weight is not None:
        weighted = (x * relative.unsqueeze(-1)).to(errors.dtype)
        if errors.dtype == grads.weight.dtype:
            grads.weight.addmm_(errors.mT, weighted)
        else:
            grads.weight.add_(errors.mT @ weighted)
    if grads.bias is not None:
        grads.bias.add_(errors.mT @ relative.to(errors.dtype))


def _add_taken(grads: _Gradients, features: Tensor, weight: Tensor, target: Tensor, grad_taken: Tensor) -> None:
    """Add the gradients of ``z_target = features . weight[target] + bias[target]``."""
    for k, grad in enumerate(grad_taken):
        if grads.features is not None:
            grads.features[k].addcmul_(grad.unsqueeze(-1), weight[k, target].to(grad.dtype))
        if grads.weight is not None:
            grads.weight[k].index_add_(0, target, grad.unsqueeze(-1) * features[k])
        if grads.bias is not None:
            grads.bias[k].index_add_(0, target, grad)


def softmax_chunk(logits: Tensor, target: Tensor, gradient: bool) -> Tensor:
    """Cross-entropy, a :data:`ChunkTerm`."""
    log_prob = torch.log_softmax(upcast_half(logits), -1)
    index = target.unsqueeze(-1)
    losses = -log_prob.gather(-1, index).squeeze(-1)
    if gradient:
        torch.exp(log_prob, out=logits)
        logits.scatter_(-1, index, (-losses).expm1().unsqueeze(-1).to(logits.dtype))  # p - 1, without cancellation
    return losses


def hinge_chunk(logits: Tensor, target: Tensor, gradient: bool, *, margin: float) -> Tensor:
    """Sum of squared hinges, a :data:`ChunkTerm` for a given ``margin``."""
    index = target.unsqueeze(-1)
    wide = upcast_half(logits)
    hinge = (wide - (wide.gather(-1, index) - margin)).clamp_min_(0)
    losses = hinge.square().sum(-1)
    if gradient:
        through_target = 2 * (hinge.gather(-1, index) - hinge.sum(-1, keepdim=True))
        torch.mul(hinge, 2, out=logits)
        logits.scatter_(-1, index, through_target.to(logits.dtype))
    return losses
