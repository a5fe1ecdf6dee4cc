"""The least that playing turn by turn computes: a bound for any decoder on this machine, and no decoder itself."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from benchmarks.common import device
from torchrl_lang.modules.decoding.gpt2_step import fast_gelu

__all__ = ["BareDecoding"]


class BareDecoding:
    """Matrix products, GELU and attention of the calls that a game takes, on kept keys and values, and nothing else.

    Of several tokens of a row the last layer computes keys and values of all, and all else of the last one only. No
    norm, no residual, no embedding, no head, no cache that is written to, no choice of a word: what remains when
    everything else costs nothing.

    Args:
        lm: GPT-2.
        n: rows.
        calls: new tokens of each row and slots that they look at, call by call.
    """

    def __init__(self, lm: GPT2LMHeadModel, n: int, calls: list[tuple[int, int]]) -> None:
        config = lm.config
        self.heads, self.width = config.n_head, config.n_embd
        self.layers = [self._weights(block) for block in lm.transformer.h]
        slots = max(visible for _, visible in calls)
        shape = (n, self.heads, slots, self.width // self.heads)
        self.kept = [(torch.randn(shape, device=device()), torch.randn(shape, device=device())) for _ in self.layers]
        self.states = {new: torch.randn(n * new, self.width, device=device()) for new, _ in calls}
        self.calls = [(new, visible, self._mask(n, new, visible)) for new, visible in calls]

    @torch.no_grad()
    def play(self) -> None:
        """Compute all of it once."""
        for new, visible, mask in self.calls:
            states = self.states[new]
            for i, (weights, kept) in enumerate(zip(self.layers, self.kept, strict=True)):
                asked = 1 if i == len(self.layers) - 1 else new
                states = self._layer(states, weights, kept, mask[:, :, -asked:], asked, visible)

    def _layer(
        self,
        states: Tensor,
        weights: list[tuple[Tensor, Tensor]],
        kept: tuple[Tensor, Tensor],
        mask: Tensor,
        asked: int,
        visible: int,
    ) -> Tensor:
        into, out, up, down = weights
        if asked * mask.shape[0] == states.shape[0]:
            query = torch.addmm(into[1], states, into[0])[:, : self.width]
        else:
            torch.addmm(into[1][self.width :], states, into[0][:, self.width :])  # keys and values
            last = states.view(mask.shape[0], -1, self.width)[:, -1]
            query = torch.addmm(into[1][: self.width], last, into[0][:, : self.width])
        query = query.view(-1, asked, self.heads, self.width // self.heads).transpose(1, 2)
        keys, values = (entry[:, :, :visible] for entry in kept)
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        states = torch.addmm(out[1], seen.transpose(1, 2).reshape(-1, self.width), out[0])
        states = torch.addmm(up[1], states, up[0])
        states = fast_gelu(states, torch.empty_like(states))
        return torch.addmm(down[1], states, down[0])

    @staticmethod
    def _weights(block: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
        parts = (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
        return [(part.weight, part.bias) for part in parts]

    @staticmethod
    def _mask(n: int, new: int, visible: int) -> Tensor:
        """Each new token sees all before it: ``[n, 1, new, visible]``."""
        place = visible - new + torch.arange(new, device=device())
        unseen = torch.arange(visible, device=device()) > place[:, None]
        return torch.zeros(n, 1, new, visible, device=device()).masked_fill(unseen, torch.finfo(torch.float32).min)
