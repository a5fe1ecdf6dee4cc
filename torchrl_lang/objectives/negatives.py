"""Which tokens a sampled CQL looks at: uniform ones, or what the policy would say."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.functional.precision import widened
from torchrl_lang.modules.actor import LOGITS
from torchrl_lang.objectives.rows import DecisionBatch, gather_inputs

__all__ = ["Proposal", "policy_proposal"]

Proposal = Literal["uniform", "policy"]

# Decisions whose policies are averaged: one product over the vocabulary, small beside those of the policy's own loss.
_DECISIONS = 32


@torch.no_grad()
def policy_proposal(
    batch: DecisionBatch, rows: TensorDictBase, head: TensorDictModuleBase | None, vocabulary: int
) -> Tensor:
    """How likely each token should be among the negatives, float ``[V]``: half what the policy says, half uniform.

    The policy's share is its mean over 32 decisions of the batch, evenly spread: the policy's loss never builds the
    logits of all. The uniform half bounds the weights (a defensive mixture): the second moment of the estimated
    partition function is at most twice that of as many uniform draws, whatever the values are.

    Args:
        batch: the decisions of the rows; only those that count are looked at.
        rows: the rows with what the actor's trunk wrote.
        head: hidden state to logits; None where the trunk wrote logits itself.
        vocabulary: ``V``, that of the values; the policy may know more tokens.

    Raises:
        ValueError: the policy knows fewer tokens than the values.
    """
    place = batch.place if batch.counted is None else batch.place[batch.counted]
    n = place.shape[0]
    uniform = torch.full((vocabulary,), 1 / vocabulary, device=place.device)
    if n == 0:
        return uniform
    some = min(n, _DECISIONS)
    index = place[torch.arange(some, device=place.device) * n // some]
    if head is None:
        logits = rows.get(LOGITS).flatten(0, 1).index_select(0, index)
    else:
        logits = head(gather_inputs(head, rows, index)).get(LOGITS)
    if logits.shape[-1] < vocabulary:
        raise ValueError(
            f"The policy knows {logits.shape[-1]} tokens, the values {vocabulary}, so cql_proposal='policy' cannot "
            "propose the others: use 'uniform'."
        )
    policy = widened(logits[..., :vocabulary]).softmax(-1).mean(0)
    return (policy + uniform) / 2
