"""The policy's term: weighted cross-entropy of the next token, evaluated only where a weight can be positive."""

from __future__ import annotations

from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang.functional import linear_cross_entropy, shift_left
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import LOGITS, linear_layer
from torchrl_lang.objectives.base import LogitsChunk, TransitionBatch, gather_inputs, in_chunks

__all__ = ["ActorNormalizer", "actor_loss", "environment_loss"]

ActorNormalizer = Literal["all", "action"]


def actor_loss(
    batch: TransitionBatch,
    rows: TensorDictBase,
    head: TensorDictModule | None,
    weight: Tensor | None,
    *,
    transition_weight: float = 0.0,
    normalizer: ActorNormalizer = "all",
    reduction: str = "mean",
    detach: bool = False,
    logits_chunk: LogitsChunk = "auto",
) -> Tensor:
    """``sum_t w_t * CE(pi(. | x_<=t), x_t+1) / n`` (ILQL, arXiv 2206.11871, sec. 4.3).

    The options are those of :class:`~torchrl_lang.objectives.ILQLLoss`.

    Args:
        batch: the decisions of the rows.
        rows: the rows with what the trunk wrote: the head's inputs ``[B, T, H]``, or ``logits`` ``[B, T, V]``.
        head: hidden state to logits, evaluated only where it is needed; None where the trunk wrote logits itself.
        weight: float ``[N]``, the weight of each decision; None for 1.
        transition_weight: weight of tokens that the environment wrote.
        normalizer: ``"all"`` divides by the number of real tokens but the first of each row, as the paper's code does;
            ``"action"`` by the number of decisions.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (``[*B, T]``).
        detach: no gradient flows from here into the trunk.
        logits_chunk: positions whose logits exist at a time, where ``head`` is one linear layer.
    """
    index = batch.place
    if weight is None:
        weight = torch.ones_like(batch.reward)
    if transition_weight:
        dense_weight = batch.at_decisions(weight, fill=transition_weight).flatten()
        index = shift_left(batch.attention_mask).flatten().nonzero().squeeze(-1)
        weight = dense_weight[index]
    if batch.mask is not None:
        # Leave out rather than multiply: a masked value may be infinite.
        kept = batch.mask.flatten()[index].nonzero().squeeze(-1)
        index, weight = index[kept], weight[kept]
    target = shift_left(batch.tokens).flatten()[index]
    inputs = gather_inputs([LOGITS] if head is None else head.in_keys, rows, index)
    inputs = inputs.detach() if detach else inputs
    layer = linear_layer(head)
    if head is not None and layer is not None and in_chunks(logits_chunk, layer.out_features):
        total, losses, _ = linear_cross_entropy(
            inputs.get(head.in_keys[0]),
            layer.weight,
            layer.bias,
            target,
            position_weight=weight,
            chunk_size=logits_chunk if isinstance(logits_chunk, int) else None,
            recompute=reduction == "none",
        )
    else:
        logits = (inputs if head is None else head(inputs)).get(LOGITS)
        losses = F.cross_entropy(upcast_half(logits), target, reduction="none")
        total = (weight * losses).sum()
    if reduction == "none":
        return batch.at_decisions(weight * losses, index).reshape(batch.shape)
    if reduction == "sum":
        return total
    counts = shift_left(batch.attention_mask) if normalizer == "all" else batch.decision
    counts = counts if batch.mask is None else counts & batch.mask
    return total / counts.sum().clamp_min(1)


def environment_loss(
    batch: TransitionBatch,
    rows: TensorDictBase,
    head: TensorDictModule | None,
    *,
    transition_weight: float,
    reduction: str,
    **options: Any,
) -> Tensor:
    """The part of :func:`actor_loss` of the environment's tokens alone; zero without a weight."""
    nothing = torch.zeros_like(batch.reward)
    if not transition_weight:
        return nothing.new_zeros(batch.shape if reduction == "none" else ())
    return actor_loss(batch, rows, head, nothing, transition_weight=transition_weight, reduction=reduction, **options)
