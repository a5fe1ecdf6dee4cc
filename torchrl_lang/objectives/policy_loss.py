"""The policy's term: weighted cross-entropy of the next token, evaluated only where a weight can be positive."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang.functional import linear_cross_entropy, shift_left
from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.actor import LOGITS, linear_layer, split_actor
from torchrl_lang.objectives.base import RowLoss, TransitionBatch, gather_inputs, in_chunks

__all__ = ["actor_loss", "environment_loss"]


def actor_loss(
    loss: RowLoss,
    batch: TransitionBatch,
    rows: TensorDictBase,
    weight: Tensor | None = None,
    *,
    transition_weight: float | None = None,
    detach: bool = False,
    environment_only: bool = False,
) -> Tensor:
    """``sum_t w_t * CE(pi(. | x_<=t), x_t+1) / n`` (ILQL, arXiv 2206.11871, sec. 4.3).

    Args:
        loss: whose policy it is, with its ``actor_normalizer``, ``reduction`` and ``logits_chunk``: ``n`` is the number
            of real tokens but the first of each row, as in the paper's code (``"all"``), or that of decisions
            (``"action"``).
        batch: the decisions of the rows.
        rows: the rows with what the trunk wrote: the head's inputs ``[B, T, H]``, or ``logits`` ``[B, T, V]``.
        weight: float ``[N]``, the weight of each decision; default 1.
        transition_weight: weight of tokens that the environment wrote; default the loss's.
        detach: no gradient flows from here into the trunk.
        environment_only: the sum is over the environment's tokens alone; ``n`` is the same.

    Returns:
        float ``[]``, or ``[*B, T]`` where nothing is reduced.
    """
    head = split_actor(loss.language_actor).head
    transition_weight = loss.transition_weight if transition_weight is None else transition_weight
    keys = [LOGITS] if head is None else head.in_keys
    if weight is None:
        weight = torch.ones_like(batch.reward, dtype=torch.promote_types(rows.get(keys[0]).dtype, torch.float32))
    index, weight = _weighted(batch, weight, transition_weight, environment_only)
    target = shift_left(batch.tokens).flatten()[index]
    inputs = gather_inputs(keys, rows, index)
    inputs = inputs.detach() if detach else inputs
    layer = linear_layer(head)
    if head is not None and layer is not None and in_chunks(loss.logits_chunk, layer.out_features):
        total, losses, _ = linear_cross_entropy(
            inputs.get(head.in_keys[0]),
            layer.weight,
            layer.bias,
            target,
            position_weight=weight,
            chunk_size=loss.logits_chunk if isinstance(loss.logits_chunk, int) else None,
            recompute=loss.reduction == "none",
        )
    else:
        logits = (inputs if head is None else head(inputs)).get(LOGITS)
        losses = F.cross_entropy(upcast_half(logits), target, reduction="none")
        total = (weight * losses).sum()
    if loss.reduction == "none":
        return batch.at_decisions(weight * losses, index).reshape(batch.shape)
    if loss.reduction == "sum":
        return total
    counts = shift_left(batch.attention_mask) if loss.actor_normalizer == "all" else batch.decision
    counts = counts if batch.mask is None else counts & batch.mask
    return total / counts.sum().clamp_min(1)


def environment_loss(loss: RowLoss, batch: TransitionBatch, rows: TensorDictBase) -> Tensor:
    """The part of :func:`actor_loss` of the environment's tokens; zero without a ``transition_weight``."""
    if not loss.transition_weight:
        return batch.reward.new_zeros(batch.shape if loss.reduction == "none" else ())
    return actor_loss(loss, batch, rows, environment_only=True)


def _weighted(
    batch: TransitionBatch, weight: Tensor, transition_weight: float, environment_only: bool
) -> tuple[Tensor, Tensor]:
    """The places of the flattened batch whose next token has a weight, int64 ``[M]``, and the weights, ``[M]``."""
    index = batch.place
    if transition_weight:
        dense_weight = batch.at_decisions(weight, fill=transition_weight).flatten()
        real = shift_left(batch.attention_mask)
        index = (real & ~batch.decision if environment_only else real).flatten().nonzero().squeeze(-1)
        weight = dense_weight[index]
    if batch.mask is None:
        return index, weight
    # Leave out rather than multiply: a masked value may be infinite.
    kept = batch.mask.flatten()[index].nonzero().squeeze(-1)
    return index[kept], weight[kept]
