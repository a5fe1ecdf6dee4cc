"""Packing, the other way to compute no padding: several rows in one line, kept apart by a mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Packed", "pack", "packed_states"]


class Packed(NamedTuple):
    """Rows in ``L`` lines of width ``W``."""

    tokens: Tensor
    """int64 ``[L, W]``."""
    positions: Tensor
    """int64 ``[L, W]``: each token's position in its own row."""
    seen: Tensor
    """bool ``[L, 1, W, W]``: True where the key is of the same row and not behind the query."""


def pack(tokens: Tensor, length: Tensor, width: int) -> Packed:
    """Put rows, ``[N, T]``, into lines, each into the first that has room, the longest first."""
    lines: list[list[int]] = []
    room: list[int] = []
    for row in length.argsort(descending=True).tolist():
        need = int(length[row])
        line = next((i for i, left in enumerate(room) if left >= need), len(lines))
        if line == len(lines):
            lines.append([])
            room.append(width)
        lines[line].append(row)
        room[line] -= need
    packed = torch.zeros(len(lines), width, dtype=torch.int64)
    positions, owner = torch.zeros_like(packed), torch.full_like(packed, -1)
    for line, rows in enumerate(lines):
        begin = 0
        for row in rows:
            end = begin + int(length[row])
            packed[line, begin:end] = tokens[row, : end - begin]
            positions[line, begin:end] = torch.arange(end - begin)
            owner[line, begin:end] = row
            begin = end
    packed, positions, owner = (x.to(tokens.device) for x in (packed, positions, owner))
    same = owner[:, :, None] == owner[:, None, :]  # padding sees padding, so that no query sees nothing
    seen = (same & torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()).unsqueeze(1)
    return Packed(packed, positions, seen)


def packed_states(model: torch.nn.Module, rows: Packed) -> Tensor:
    """Hidden states ``[L, W, H]`` of a headless Hugging Face model."""
    embedded = model.get_input_embeddings()(rows.tokens)  # type: ignore[operator]
    return model(
        inputs_embeds=embedded, position_ids=rows.positions, attention_mask=rows.seen, use_cache=False
    ).last_hidden_state
