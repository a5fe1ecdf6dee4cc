"""How the new tokens of a batch of rows are read: in one call of the model or in two."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PrefillChunk", "prefill_chunks"]

# Rows are read in two groups where that spares so many tokens, about what a call costs beside its tokens, and such a
# part of all: a group's keys and values have to be gathered.
_WORTH_A_CALL, _WORTH_A_GATHER = 256, 0.25


class PrefillChunk(NamedTuple):
    """Rows that are read together: the last ``width`` tokens of each, or all where it has fewer."""

    rows: Tensor | None
    """int64 ``[M]``; None for all."""
    width: int
    """Tokens to read of each row."""
    longest: int
    """Length of the longest of the rows."""


def prefill_chunks(length: Tensor, known: Tensor) -> list[PrefillChunk]:
    """How to read what is new of rows, in one call or, where few rows have much more than the others, in two.

    Args:
        length: int64 ``[N]``, at least 1.
        known: int64 ``[N]``, tokens that have been read before, fewer than ``length``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.prefill_chunk import prefill_chunks
        >>> length, known = torch.tensor([40, 600, 41]), torch.tensor([36, 0, 36])
        >>> [(piece.rows.tolist(), piece.width, piece.longest) for piece in prefill_chunks(length, known)]
        [([0, 2], 5, 41), ([1], 600, 600)]
    """
    whole, new = torch.stack([length, length - known]).cpu()  # the one wait for the device
    n = new.shape[0]
    ordered, order = new.sort(stable=True)
    spared = torch.arange(n) * (ordered[-1] - torch.cat([ordered[:1], ordered[:-1]]))  # by reading the first ones apart
    cut = int(spared.argmax())
    if spared[cut] < max(_WORTH_A_CALL, _WORTH_A_GATHER * n * int(ordered[-1])):
        return [PrefillChunk(None, int(ordered[-1]), int(whole.max()))]
    groups = order[:cut].sort().values, order[cut:].sort().values
    return [PrefillChunk(rows.to(length.device), int(new[rows].max()), int(whole[rows].max())) for rows in groups]
