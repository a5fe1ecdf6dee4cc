"""The policy's term: weighted cross-entropy of the next token, evaluated only where a weight can be positive."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang.functional import shift_left
from torchrl_lang.modules.actor import LOGITS
from torchrl_lang.objectives.rows import DecisionBatch, full_precision, gather_inputs

__all__ = ["ActorNormalizer", "actor_loss"]

ActorNormalizer = Literal["all", "action"]


def actor_loss(
    batch: DecisionBatch,
    rows: TensorDictBase,
    head: TensorDictModule | None,
    weight: Tensor | None,
    *,
    transition_weight: float = 0.0,
    normalizer: ActorNormalizer = "all",
    reduction: str = "mean",
    detach: bool = False,
) -> Tensor:
    """``sum_t w_t * CE(pi(. | x_<=t), x_t+1) / n`` (ILQL, arXiv 2206.11871, sec. 4.3).

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
    """
    index = batch.place
    if weight is None:
        weight = torch.ones_like(batch.reward)
    if transition_weight:
        dense_weight = weight.new_full((batch.decision.numel(),), transition_weight).index_copy(0, index, weight)
        index = shift_left(batch.attention_mask).flatten().nonzero().squeeze(-1)
        weight = dense_weight[index]
    logits = _logits(rows, head, index, detach)
    loss = weight * F.cross_entropy(full_precision(logits), batch.next_token.flatten()[index], reduction="none")
    if batch.mask is not None:
        # Select rather than multiply: a masked value may be infinite.
        loss = torch.where(batch.mask.flatten()[index], loss, 0)
    if reduction == "none":
        return loss.new_zeros(batch.decision.numel()).index_copy(0, index, loss).reshape(batch.shape)
    if reduction == "sum":
        return loss.sum()
    counts = shift_left(batch.attention_mask) if normalizer == "all" else batch.decision
    counts = counts if batch.mask is None else counts & batch.mask
    return loss.sum() / counts.sum().clamp_min(1)


def _logits(rows: TensorDictBase, head: TensorDictModule | None, index: Tensor, detach: bool) -> Tensor:
    if head is None:
        logits = rows.get(LOGITS).flatten(0, 1).index_select(0, index)
        return logits.detach() if detach else logits
    inputs = gather_inputs(head, rows, index)
    return head(inputs.detach() if detach else inputs).get(LOGITS)
