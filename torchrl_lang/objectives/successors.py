"""What is backed up from the successors of a batch's decisions, a chunk of states at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchrl_lang.objectives.base import RowLoss, TransitionBatch
from torchrl_lang.objectives.checks import vocabulary

__all__ = ["next_values"]

# Action values of one head in memory at a time: 16 MB of float32.
_VALUES_AT_ONCE = 2**22


@torch.no_grad()
def next_values(loss: RowLoss, batch: TransitionBatch, backup: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The value of each decision's successor, ``[N]``; zero where the task ended or nothing counts.

    Args:
        loss: whose actor writes the tokens and whose ``logits_chunk`` is the size of a chunk.
        batch: the decisions of the rows.
        backup: ``(place, certain) -> value``, each ``[M]``: the states' places in the flattened batch, int64, and
            where only the end of the utterance can be written, bool.
    """
    index = (batch.counts & ~batch.terminated).nonzero().squeeze(-1)
    place = batch.state_place[batch.state[index] + 1]
    certain = loss.scorer.certain(batch, place)
    found = torch.cat([backup(place[part], certain[part]) for part in _parts(loss, place.shape[0])])
    return found.new_zeros(batch.place.shape).index_copy(0, index, found)


def _parts(loss: RowLoss, number: int) -> Iterator[slice]:
    """Slices of the states whose values over the vocabulary exist at a time; one where there are no states."""
    size = loss.logits_chunk
    if size == "auto":
        known = vocabulary(loss.actor_network)
        size = None if known is None else max(_VALUES_AT_ONCE // known, 1)
    size = size or max(number, 1)
    return (slice(start, start + size) for start in range(0, max(number, 1), size))
