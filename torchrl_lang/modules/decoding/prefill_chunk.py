"""Split the new tokens of a batch of rows into one or two calls of the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PrefillChunk", "prefill_chunks"]

# Rows are read in two groups if that saves this many tokens (about the overhead of a call) and this fraction of all
# tokens, because a group's keys and values have to be gathered.
_WORTH_A_CALL, _WORTH_A_GATHER = 256, 0.25


class PrefillChunk(NamedTuple):
    """Rows that are read together: the last ``width`` tokens of each, or all if it has fewer."""

    rows: Tensor | None
    """int64 ``[M]``; None for all rows."""
    width: int
    """Number of tokens to read of each row."""
    longest: int
    """Length of the longest of the rows."""


def prefill_chunks(length: Tensor, known: Tensor) -> list[PrefillChunk]:
    """Split new tokens into one call, or two if few rows have many more new tokens than the others.

    Args:
        length: int64 ``[N]``, at least 1.
        known: int64 ``[N]``, number of tokens in the cache, less than ``length``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.prefill_chunk import prefill_chunks
        >>> length, known = torch.tensor([40, 600, 41]), torch.tensor([36, 0, 36])
        >>> [(piece.rows.tolist(), piece.width, piece.longest) for piece in prefill_chunks(length, known)]
        [([0, 2], 5, 41), ([1], 600, 600)]
    """
    whole, new = torch.stack([length, length - known]).cpu()  # the only synchronization with the device
    n = new.shape[0]
    ordered, order = new.sort(stable=True)
    saved = torch.arange(n) * (ordered[-1] - torch.cat([ordered[:1], ordered[:-1]]))  # tokens saved by a second group
    cut = int(saved.argmax())
    if saved[cut] < max(_WORTH_A_CALL, _WORTH_A_GATHER * n * int(ordered[-1])):
        return [PrefillChunk(None, int(ordered[-1]), int(whole.max()))]
    groups = order[:cut].sort().values, order[cut:].sort().values
    return [PrefillChunk(rows.to(length.device), int(new[rows].max()), int(whole[rows].max())) for rows in groups]
