"""The trunk of an algorithm-distillation model: embedding and blocks, with and without a cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from torchrl_lang.algorithm_distillation.ad_blocks import Block, KeyValues
from torchrl_lang.algorithm_distillation.ad_embedding import StepEmbedding, Steps

__all__ = ["ADTrunk"]


class ADTrunk(nn.Module):
    """Hidden states of steps, each of which depends on its own and earlier steps only.

    Args:
        embedding: one vector per step, ``[*S, W]``.
        width: ``W``.
        layers: number of blocks.
        heads: attention heads.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import Continuous, Discrete
        >>> from torchrl_lang.algorithm_distillation.ad_embedding import StepEmbedding, Steps
        >>> from torchrl_lang.algorithm_distillation.ad_trunk import ADTrunk
        >>> embedding = StepEmbedding(Continuous(2), Discrete([5]), context=6, episode_length=3, width=8)
        >>> trunk = ADTrunk(embedding, width=8, layers=2, heads=2)
        >>> numbers = torch.tensor([[0, 1, 2, 0, 1, 2]])
        >>> hidden, past = trunk(Steps.of_windows(torch.randn(1, 6, 2), numbers, torch.zeros(1, 6), numbers))
        >>> hidden.shape, len(past)
        (torch.Size([1, 6, 8]), 2)
    """

    def __init__(self, embedding: StepEmbedding, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.width, self.heads = width, heads

    def forward(self, steps: Steps) -> tuple[Tensor, list[KeyValues]]:
        """Hidden states ``[B, L, W]`` of whole contexts, and the keys and values of each block."""
        hidden, past = self.embedding(steps), []
        for block in self.blocks:
            hidden, kept = block(hidden)
            past.append(kept)
        return self.norm(hidden), past

    def step(self, steps: Steps, past: list[KeyValues]) -> Tensor:
        """Hidden states ``[N, W]`` of the next step of each context, ``[N]``.

        Its keys and values are written to ``past``. The step at position ``p`` attends to positions 0 to ``p``,
        whatever ``past`` holds at later ones.
        """
        row = torch.arange(len(steps.position), device=steps.position.device)
        place = torch.arange(int(steps.position.max()) + 1, device=steps.position.device)
        visible = (place <= steps.position[:, None])[:, None, None]
        hidden = self.embedding(steps)[:, None]
        for block, kept in zip(cast(Iterable[Block], self.blocks), past, strict=True):
            hidden = block.step(hidden, kept, row, steps.position, visible)
        return self.norm(hidden[:, 0])

    def empty_past(self, contexts: int, length: int) -> list[KeyValues]:
        """Zero keys and values for contexts of up to ``length`` steps."""
        shape, weight = (contexts, self.heads, length, self.width // self.heads), self.norm.weight
        return [KeyValues(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in self.blocks]
