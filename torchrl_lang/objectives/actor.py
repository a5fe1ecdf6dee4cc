"""The policy's term: weighted cross-entropy of the next token, evaluated only where a weight can be positive."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang.functional import shift_left
from torchrl_lang.objectives.rows import DecisionBatch, full_precision, gather_inputs

__all__ = ["ActorNormalizer", "actor_loss"]

ActorNormalizer = Literal["all", "action"]


def actor_loss(
    batch: DecisionBatch,
    rows: TensorDictBase,
    head: TensorDictModule | None,
    weight: Tensor | None,
    *,
    logits_key: str,
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
        logits_key: where the logits stand.
        transition_weight: weight of tokens that the environment wrote.
        normalizer: ``"all"`` divides by the number of real tokens but the first of each row, as the paper's code does;
            ``"action"`` by the number of decisions.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (``[*B, T]``).
        detach: no gradient flows from here into the trunk.
    """
    index, dense_weight = batch.place, None
    if weight is None:
        weight = torch.ones_like(batch.reward)
    if batch.counted is not None:
        weight = torch.where(batch.counted, weight, 0)
    if transition_weight:
        has_next = shift_left(batch.attention_mask)
        dense_weight = torch.full_like(batch.next_reward, transition_weight).flatten()
        dense_weight = dense_weight.index_copy(0, index, weight)
        index = has_next.flatten().nonzero().squeeze(-1)
        weight = dense_weight[index]
    logits = _logits(rows, head, index, logits_key, detach)
    loss = weight * F.cross_entropy(full_precision(logits), batch.next_token.flatten()[index], reduction="none")
    if reduction == "none":
        return loss.new_zeros(batch.decision.numel()).index_copy(0, index, loss).reshape(batch.shape)
    if reduction == "sum":
        return loss.sum()
    counts = batch.attention_mask[:, 1:] if normalizer == "all" else batch.decision
    return loss.sum() / counts.sum().clamp_min(1)


def _logits(
    rows: TensorDictBase, head: TensorDictModule | None, index: Tensor, logits_key: str, detach: bool
) -> Tensor:
    if head is None:
        logits = rows.get(logits_key).flatten(0, 1).index_select(0, index)
        return logits.detach() if detach else logits
    inputs = gather_inputs(head, rows, index)
    return head(inputs.detach() if detach else inputs).get(logits_key)
