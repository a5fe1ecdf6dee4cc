"""A key-value cache aligned with the row: slot ``p`` belongs to the token at position ``p``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from torchrl_lang.modules.frozen.frozen_states import block_list
from torchrl_lang.modules.hugging_face import attention_windows

if TYPE_CHECKING:
    from torchrl_lang.modules.trunk import Trunk

# GPU attention kernels are faster for a round number of slots; excess slots are masked. CPUs read the exact number.
_ROUND = 16
_SPARE = 1  # a slot that is never visible, so that a compiled step is not recompiled when all other slots are


class RowCache(Cache):
    """Keys and values of ``N`` rows with room for ``size`` tokens each, allocated when the first layer writes.

    Because slots are positions, prompts of different lengths need no left padding: padding after a short prompt also
    writes keys, but a token attends only to slots up to its own position, and those have been overwritten by the row's
    real tokens by then. For the same reason a later turn needs only its new tokens, and a new row needs no clearing.

    Args:
        size: number of slots.
        rows: number of rows to allocate; default that of the first call. Calls with fewer rows use the first ones.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import Trunk, causal_lm
        >>> from torchrl_lang.modules.decoding.cache import RowCache
        >>> trunk = Trunk(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)).eval()
        >>> row, cache = torch.randint(11, (1, 6)), RowCache(6)
        >>> _ = cache.extend(trunk, row[:, :4])
        >>> hidden = cache.extend(trunk, row[:, 4:], torch.tensor([[4, 5]]))
        >>> torch.testing.assert_close(hidden, trunk(row)[:, 4:])
    """

    def __init__(self, size: int, *, rows: int | None = None) -> None:
        super().__init__(layer_class_to_replicate=_RowLayer)
        self.size, self._capacity, self._visible = size, rows, size
        self._rows: Tensor | None = None
        self._positions: Tensor | None = None
        self._slots: Tensor | None = None
        self._dtype: torch.dtype | None = None
        self.kept_below = 0
        """A number of layers, whose output is kept as well; 0 for none."""

    def extend(
        self,
        trunk: Trunk,
        tokens: Tensor,
        positions: Tensor | None = None,
        visible: int | None = None,
        *,
        rows: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Add tokens to rows whose beginnings are in the cache, and return their states.

        Args:
            trunk: the model; every token attends to the tokens at positions up to its own.
            tokens: int64 ``[N, q]``, or embeddings float ``[N, q, H]``.
            positions: int64 ``[N, q]``, distinct within a row; all earlier positions must have been read. ``None`` for
                the beginning of rows.
            visible: number of slots to attend to, more than the largest position; default all. Fewer are faster.
            rows: int64 ``[N]``, the distinct rows of these tokens; default the first ``N``.
            position_ids: int64 ``[N, q]``, the positions that the model embeds, where they are not the slots.

        Returns:
            ``hidden`` ``[N, q, H]``.

        Raises:
            ValueError: the cache has fewer slots than ``visible``.
        """
        if self._dtype is None:
            self._dtype = _common_dtype(trunk.model)
        slots = self.expect(tokens, positions, visible, rows=rows, rounded=trunk.compiled)
        more: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
        if positions is not None:
            more = {"position_ids": positions, "attention_mask": _mask(trunk, positions, slots, self._dtype), **more}
        with self._keeping(trunk):
            return trunk.states(tokens, past_key_values=self, use_cache=True, **more)

    @contextmanager
    def _keeping(self, trunk: Trunk) -> Iterator[None]:
        """Keep the output of the lower layers as well, as keys and values of one more layer."""
        if not self.kept_below:
            yield
            return
        blocks = block_list(trunk.model)[1]

        def keep(block: nn.Module, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            first, second = states.unsqueeze(1).chunk(2, -1)
            self.update(first, second, len(blocks))

        hook = blocks[self.kept_below - 1].register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    def kept_states(self, row: int, length: int) -> Tensor:
        """The output of the lower layers at the first tokens of a row, ``[L, H]``."""
        layer = self.layers[-1]
        return torch.cat([half[row, :length].flatten(1) for half in (layer.keys, layer.values)], -1)

    def expect(
        self, tokens: Tensor, positions: Tensor | None, visible: int | None, rows: Tensor | None, rounded: bool = False
    ) -> int:
        """Prepare the calls of :meth:`update`, one per layer; the arguments are those of :meth:`extend`.

        Returns:
            The number of slots that :meth:`update` returns. At the beginning of rows these are the new tokens, and
            attention is causal.
        """
        visible = self.size if visible is None else visible
        if max(visible, tokens.shape[1]) > self.size:
            raise ValueError(f"{max(visible, tokens.shape[1])} tokens do not fit a RowCache({self.size}).")
        self._rows, self._positions, self._slots = rows, positions, None
        # Round the number of slots if kernels are compiled or chosen per number; a CPU reads the exact number.
        self._visible = _rounded(visible) if rounded or not tokens.is_cpu else visible
        return self._visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values ``[N, heads, q, D]`` of one layer and return all visible ones."""
        while len(self.layers) <= layer_idx:
            self.layers.append(_RowLayer())
        layer = self.layers[layer_idx]
        if not layer.is_initialized:
            rows, slots = self._capacity or key_states.shape[0], _rounded(self.size) + _SPARE
            layer.allocate(key_states, value_states, rows, slots)
        if self._positions is None:
            return layer.write_front(key_states, value_states, self._rows)
        if self._slots is None:  # the same for all layers
            self._slots = _slots(self._positions, self._rows, layer.keys.shape[1])
        return layer.write(key_states, value_states, self._slots, self._visible, self._rows)

    def reordered(self, rows: Tensor, size: int | None = None) -> RowCache:
        """A copy of the given rows, int64 ``[M]``, with their first ``size`` slots; this cache is not changed."""
        size = self.size if size is None else min(size, self.size)
        copy = RowCache(size)
        for layer in self.layers:
            kept = _RowLayer()
            kept.keys, kept.values = (x[:, : _rounded(size)][rows] for x in (layer.keys, layer.values))
            kept.is_initialized = True
            copy.layers.append(kept)
        return copy

    def swap(self, first: Tensor, second: Tensor) -> None:
        """Exchange the rows ``first`` and ``second``, both int64 ``[M]``, all different."""
        for layer in self.layers:
            swap_rows(layer.keys, first, second)
            swap_rows(layer.values, first, second)

    def reserve(self, rows: int) -> None:
        """Allocate this many rows, unless they have been allocated or given."""
        self._capacity = self._capacity or rows

    def copy_front(self, width: int, source: Tensor, rows: Tensor) -> None:
        """Copy the first ``width`` slots of the rows ``source`` to others, both int64 ``[M]``."""
        for layer in self.layers:
            for kept in (layer.keys, layer.values):
                kept[rows, :width] = kept[source, :width]

    def grow(self, size: int) -> None:
        """Make room for ``size`` tokens per row; the content is kept."""
        for layer in self.layers:
            layer.grow(_rounded(size) + _SPARE)
        self.size = max(size, self.size)


class PrefixKeys(Cache):
    """Keys and values of ``G`` prefixes, which the further tokens of ``N`` rows attend to; gradients flow through them.

    The first pass of a model with this cache reads the prefixes, int64 ``[G, P]``. After it :meth:`follow` reads the
    tokens of rows behind them, any number of times.

    Args:
        width: ``P``, number of tokens of a prefix.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules import Trunk, causal_lm
        >>> from torchrl_lang.modules.decoding.cache import PrefixKeys
        >>> trunk = Trunk(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)).eval()
        >>> row, keys = torch.randint(11, (1, 6)), PrefixKeys(4)
        >>> _ = trunk.states(row[:, :4], past_key_values=keys, use_cache=True)
        >>> hidden = keys.follow(trunk, row[:, 4:], torch.tensor([0]))
        >>> torch.testing.assert_close(hidden, trunk(row)[:, 4:])
    """

    def __init__(self, width: int) -> None:
        super().__init__(layer_class_to_replicate=_RowLayer)
        self._width = width
        self._prefixes: dict[int, tuple[Tensor, Tensor]] = {}  # by layer
        self._group: Tensor | None = None

    def follow(self, trunk: Trunk, tokens: Tensor, group: Tensor, **options: Any) -> Tensor:
        """States of tokens ``[N, q]`` right behind the prefixes ``group``, int64 ``[N]``, of their rows.

        The ``options``, and that tokens may be embedded, are those of :meth:`Trunk.states`.
        """
        self._group, cut = group, self._width
        positions = torch.arange(cut, cut + tokens.shape[1], device=tokens.device)[None]
        mask = _mask(trunk, positions, cut + tokens.shape[1], _common_dtype(trunk.model))
        options = {"past_key_values": self, "use_cache": True, "position_ids": positions, **options}
        return trunk.states(tokens, attention_mask=mask, **options)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values ``[G, heads, P, D]`` of one layer; return those behind them with their prefixes'."""
        if (group := self._group) is None:
            self._prefixes[layer_idx] = key_states, value_states
            return key_states, value_states
        keys, values = (kept.index_select(0, group) for kept in self._prefixes[layer_idx])
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


def _rounded(slots: int) -> int:
    return -(-slots // _ROUND) * _ROUND


def _common_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's weights; float32 for mixed ones, because attention accepts it with any other."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def scores(positions: Tensor, visible: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """The attention bias of the first slots: 0 up to the token's own position, else the least number.

    ``int64 [N, q] -> [N, 1, q, visible]``. As numbers, because attention would convert bools in each layer. With a
    ``window`` only that many slots are visible, including the token's own.
    """
    slot, own = torch.arange(visible, device=positions.device), positions[:, None, :, None]
    unseen = slot > own
    if window is not None:
        unseen |= slot <= own - window
    zero = torch.zeros((), dtype=dtype, device=positions.device)
    return torch.where(unseen, torch.finfo(dtype).min, zero)


def _mask(trunk: Trunk, positions: Tensor, visible: int, dtype: torch.dtype) -> Any:
    """Make the attention bias of :func:`scores` as a model takes it: one per kind of its layers if it has several."""
    windows = attention_windows(trunk.model.config).items()
    masks = {kind: scores(positions, visible, dtype, window) for kind, window in windows}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _slots(positions: Tensor, rows: Tensor | None, size: int) -> Tensor:
    """Indices of the tokens at ``positions`` ``[N, q]`` in ``[rows * size]``, int64 ``[N * q]``."""
    row = torch.arange(positions.shape[0], device=positions.device) if rows is None else rows
    return (row[:, None] * size + positions).flatten()


def swap_rows(values: Tensor, first: Tensor, second: Tensor) -> None:
    """Exchange rows of ``values`` in place; ``first`` and ``second`` are int64 ``[M]``, all different."""
    values[torch.cat([first, second])] = values[torch.cat([second, first])]


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values, ``[N, size, heads, D]``: those of a token are contiguous, so writing is fast.

    Attention, which takes ``[N, heads, size, D]``, reads this layout as fast as its own.
    """

    is_sliding = False

    def allocate(self, keys: Tensor, values: Tensor, rows: int, size: int) -> None:
        # Zeros, not empty memory: unwritten slots are masked, but a NaN would pass the mask.
        self.keys = keys.new_zeros(rows, size, keys.shape[1], keys.shape[-1])
        self.values = values.new_zeros(rows, size, values.shape[1], values.shape[-1])
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.allocate(key_states, value_states, key_states.shape[0], key_states.shape[-2])

    def grow(self, size: int) -> None:
        if self.is_initialized and size > self.keys.shape[1]:
            keys, values = self.keys, self.values
            self.allocate(keys.transpose(1, 2), values.transpose(1, 2), keys.shape[0], size)
            self.keys[:, : keys.shape[1]], self.values[:, : values.shape[1]] = keys, values

    def write_front(self, keys: Tensor, values: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        n, _, q, _ = keys.shape
        place: Any = slice(n) if rows is None else rows
        self.keys[place, :q] = keys.transpose(1, 2)
        self.values[place, :q] = values.transpose(1, 2)
        return keys, values

    def write(
        self, keys: Tensor, values: Tensor, slots: Tensor, visible: int, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        n = keys.shape[0]
        for kept, new in ((self.keys, keys), (self.values, values)):
            width = kept.shape[2] * kept.shape[3]
            kept.view(-1, width).index_copy_(0, slots, new.transpose(1, 2).reshape(-1, width))
        place: Any = slice(n) if rows is None else rows
        return self.keys[place, :visible].transpose(1, 2), self.values[place, :visible].transpose(1, 2)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.write_front(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0  # positions always come with the tokens

    def get_max_length(self) -> int:
        return self.keys.shape[1] if self.is_initialized else -1
