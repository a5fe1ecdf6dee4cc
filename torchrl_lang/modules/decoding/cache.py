"""A cache of keys and values that is aligned with the row: slot ``p`` holds what the token at position ``p`` left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from torchrl_lang.modules.trunk import Trunk

__all__ = ["RowCache"]


class RowCache(Cache):
    """Keys and values of ``N`` rows with room for ``size`` tokens each, allocated when the first layer writes.

    Because slots are positions, prompts of different lengths need no padding on the left: padding behind a short prompt
    does leave keys, but a token looks only at slots up to its own position, and by then they have been overwritten by
    the row's real tokens. For the same reason a later turn may feed only its new tokens.

    Args:
        size: number of slots.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import RowCache, Trunk, causal_lm
        >>> trunk = Trunk(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)).eval()
        >>> row, cache = torch.randint(11, (1, 6)), RowCache(6)
        >>> _ = cache.extend(trunk, row[:, :4])
        >>> hidden, = cache.extend(trunk, row[:, 4:], torch.tensor([[4, 5]]))
        >>> torch.testing.assert_close(hidden, trunk(row)[:, 4:])
    """

    def __init__(self, size: int) -> None:
        super().__init__(layer_class_to_replicate=_RowLayer)
        self.size = size
        self._positions: Tensor | None = None
        self._visible = size

    def extend(
        self, trunk: Trunk, tokens: Tensor, positions: Tensor | None = None, visible: int | None = None
    ) -> tuple[Tensor, ...]:
        """Read tokens of rows whose beginnings are in the cache, and add them to it.

        Args:
            trunk: the model; every token sees the tokens at positions up to its own.
            tokens: int64 ``[N, q]``.
            positions: int64 ``[N, q]``, a different one for each token of a row, where all before have been read;
                ``None`` for the beginning of the rows.
            visible: number of slots to look at, more than the largest position; default all. Fewer is faster.

        Returns:
            ``hidden`` ``[N, q, H]`` and, where the trunk exposes it, ``hidden_pre_norm``.

        Raises:
            ValueError: the cache has fewer slots than are to be looked at.
        """
        visible = self.size if visible is None else visible
        if max(visible, tokens.shape[-1]) > self.size:
            raise ValueError(f"{max(visible, tokens.shape[-1])} tokens do not fit a RowCache({self.size}).")
        self._positions, self._visible = positions, visible
        if positions is None:
            return trunk.states(tokens, past_key_values=self, use_cache=True)
        slots = torch.arange(visible, device=tokens.device)
        mask = (slots <= positions.unsqueeze(-1)).unsqueeze(1)  # [N, 1, q, S], taken as it is by Hugging Face models
        if trunk.model.config._attn_implementation == "eager":  # which adds the mask to the scores
            mask = torch.zeros_like(mask, dtype=trunk.model.dtype).masked_fill(
                ~mask, torch.finfo(trunk.model.dtype).min
            )
        return trunk.states(tokens, past_key_values=self, position_ids=positions, attention_mask=mask, use_cache=True)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the keys and values ``[N, heads, q, D]`` of one layer and return all visible ones."""
        while len(self.layers) <= layer_idx:
            self.layers.append(_RowLayer())
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            layer.allocate(key_states, value_states, self.size)
        if self._positions is None:
            return layer.write_front(key_states, value_states)
        return layer.write(key_states, value_states, self._positions, self._visible)

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, int64 ``[M]``, in that order; a row may be taken more than once."""
        for layer in self.layers:
            layer.select(rows)


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values, ``[N, size, heads, D]``: the layout in which models make them."""

    is_sliding = False

    def allocate(self, keys: Tensor, values: Tensor, size: int) -> None:
        n, heads, _, _ = keys.shape
        # Zeros, not empty memory: a slot that nobody wrote is masked, but a NaN in it would not stay masked.
        self.keys = keys.new_zeros(n, size, heads, keys.shape[-1])
        self.values = values.new_zeros(n, size, heads, values.shape[-1])
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.allocate(key_states, value_states, key_states.shape[-2])

    def write_front(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        q = keys.shape[-2]
        self.keys[:, :q] = keys.transpose(1, 2)
        self.values[:, :q] = values.transpose(1, 2)
        return keys, values

    def write(self, keys: Tensor, values: Tensor, positions: Tensor, visible: int) -> tuple[Tensor, Tensor]:
        row = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self.keys[row, positions] = keys.transpose(1, 2)
        self.values[row, positions] = values.transpose(1, 2)
        return self.keys[:, :visible].transpose(1, 2), self.values[:, :visible].transpose(1, 2)

    def select(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.write_front(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # positions always come with the tokens

    def get_max_length(self) -> int:
        return self.keys.shape[1] if self.is_initialized else -1
