"""Causal transformer blocks, over whole contexts or over new steps with the keys and values of earlier ones."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Block", "KeyValues"]


class KeyValues(NamedTuple):
    """The keys and values of one block for ``N`` contexts of up to ``C`` steps, each ``[N, heads, C, W / heads]``."""

    keys: Tensor
    values: Tensor


class Block(nn.Module):
    """A pre-norm block: causal attention, then a layer of four times the width.

    Args:
        width: ``W``, a multiple of ``heads``.
        heads: number of attention heads.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.ad_blocks import Block
        >>> out, past = Block(8, 2)(torch.randn(3, 5, 8))
        >>> out.shape, past.keys.shape
        (torch.Size([3, 5, 8]), torch.Size([3, 2, 5, 4]))
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> tuple[Tensor, KeyValues]:
        """Whole contexts, ``[B, L, W]``: the new hidden states, and keys and values."""
        query, key, value = self._qkv(hidden)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self._finish(hidden, seen), KeyValues(key, value)

    def step(self, hidden: Tensor, past: KeyValues, row: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        """One new step of each context, ``[N, 1, W]``; its keys and values are written to ``past``.

        Args:
            hidden: hidden states of the new steps.
            past: keys and values of the block.
            row: int64 ``[N]``: ``arange(N)``.
            position: int64 ``[N]``: the position of each new step.
            visible: bool ``[N, 1, 1, M]``: positions, among the first ``M``, that each new step attends to.
        """
        query, key, value = self._qkv(hidden)
        past.keys[row, :, position], past.values[row, :, position] = key[:, :, 0], value[:, :, 0]
        keys, values = (kept[:, :, : visible.shape[-1]] for kept in past)
        return self._finish(hidden, F.scaled_dot_product_attention(query, keys, values, attn_mask=visible))

    def _qkv(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = self.qkv(self.norm_attention(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        return query, key, value

    def _finish(self, hidden: Tensor, seen: Tensor) -> Tensor:
        hidden = hidden + self.projection(seen.transpose(1, 2).flatten(2))
        return hidden + self.down(F.relu(self.up(self.norm_mlp(hidden))))
