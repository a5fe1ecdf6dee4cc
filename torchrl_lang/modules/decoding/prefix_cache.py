"""The prefix cache: tokens of transcripts with their keys and values, kept from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.frozen.frozen_states import states_name
from torchrl_lang.modules.frozen.kept_states import KeptStates
from torchrl_lang.modules.sharding import local_part
from torchrl_lang.modules.trunk import Trunk

if TYPE_CHECKING:
    from torchrl_lang.modules.decoding.gpt2_step import GPT2Step

_ADAPTERS = "_disable_adapters"  # attribute of PEFT layers: whether their adapters are off
_CHUNK = 1 << 22  # number of half-precision entries that are converted to float32 at a time


class WeightSnapshot:
    """Stores properties of modules' weights, and compares them with the current ones.

    Any of these differences counts as a change:

    - the memory, dtype and autograd version counter of each parameter and buffer. They detect an optimizer's step,
      ``load_state_dict`` and ``.to()``, however small the change;
    - the values: vectors themselves, matrices times a fixed random vector. They detect writes through ``.data``, as in
      TorchRL's collectors, or from another process to shared memory. A change of a single weight is detected from a
      relative size of about one unit in the last place of its row's sum;
    - the state of the computation: active PEFT adapters, autocast, inference mode, the precision of matrix products.

    Other settings of modules, and hooks, are not compared. Each weight is read once, as in one decoding step; if
    weights are sharded over processes, each process reads its own part. Synchronizes with the device once.

    Args:
        modules: the modules whose weights are compared.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.prefix_cache import WeightSnapshot
        >>> net = torch.nn.Linear(3, 2)
        >>> snapshot = WeightSnapshot([net])
        >>> snapshot.unchanged([net])
        True
        >>> _ = net.weight.data[0, 0].add_(1e-3)
        >>> snapshot.unchanged([net])
        False
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._probes: dict[torch.device, Tensor] = {}
        tensors = _tensors(modules)
        self._facts = _facts(modules, tensors)
        self._longest = max((t.numel() // t.shape[0] for t in tensors if t.ndim > 1 and t.numel()), default=0)
        self._values = self._read(tensors)

    def unchanged(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are the same modules with the same weights."""
        if len(modules) != len(self._modules) or not all(map(is_, modules, self._modules)):
            return False
        tensors = _tensors(modules)
        if _facts(modules, tensors) != self._facts:
            return False
        return all(torch.equal(now, then) for now, then in zip(self._read(tensors), self._values, strict=True))

    @torch.no_grad()
    def _read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One vector for each device and dtype."""
        parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with ExitStack() as full_precision:
            for kind in {tensor.device.type for tensor in tensors}:
                full_precision.enter_context(torch.autocast(kind, enabled=False))
            for tensor in tensors:
                read = self._project(tensor)
                parts.setdefault((read.device, read.dtype), []).append(read)
        return [torch.cat(found) for found in parts.values()]

    def _project(self, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.numel() == 0:
            return tensor if tensor.ndim == 1 else tensor.reshape(-1)
        matrix = tensor.flatten(1)
        if tensor.device not in self._probes:  # no entry near zero
            self._probes[tensor.device] = 1 + torch.arange(self._longest, device=tensor.device).sin() / 2
        probe = self._probes[tensor.device][: matrix.shape[1]]
        if matrix.dtype in (torch.float32, torch.float64):
            return matrix.mv(probe.to(matrix.dtype))
        return torch.cat([chunk.float().mv(probe) for chunk in matrix.split(max(_CHUNK // matrix.shape[1], 1))])


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, for sharded ones the local part; a module that occurs twice is read once."""
    return [local_part(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _facts(modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> list[Any]:
    """Properties other than values: of the tensors, and of the computation."""
    facts: list[Any] = [torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()]
    for tensor in tensors:
        version = 0 if tensor.is_inference() else tensor._version
        facts.append((tensor.data_ptr(), version, tensor.dtype, tensor.shape))
    for kind in sorted({tensor.device.type for tensor in tensors}):
        facts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
    layers = [vars(child) for module in modules for child in module.modules() if _ADAPTERS in vars(child)]
    return facts + [(layer[_ADAPTERS], str(layer.get("_active_adapter"))) for layer in layers]


class Compaction(NamedTuple):
    """Moves that fill the places of rows which leave a batch: the last remaining rows move there."""

    order: Tensor
    """int64 ``[M]``: the remaining rows in their new order."""
    holes: Tensor
    """int64 ``[L]``: places below ``M`` that become free."""
    movers: Tensor
    """int64 ``[L]``: rows from ``M`` on that move there."""


def compaction(staying: Tensor) -> Compaction:
    """Find the fewest moves that bring the remaining rows, bool ``[N]``, to the front.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.prefix_cache import compaction
        >>> compaction(torch.tensor([True, False, True, True])).order
        tensor([0, 3, 2])
    """
    count = int(staying.sum())
    holes = (~staying[:count]).nonzero().squeeze(-1)
    movers = staying[count:].nonzero().squeeze(-1) + count
    order = torch.arange(count, device=staying.device).index_copy(0, holes, movers)
    return Compaction(order, holes, movers)


class Transcripts:
    """The cached rows of one batch, with a key-value cache per trunk.

    A row may be at another place in the cache than in the batch, because active rows are in front. The slots of a row's
    features are before those of its tokens.
    """

    def __init__(
        self, trunks: Sequence[Trunk], n: int, size: int, device: torch.device, *, keep_states: bool = False
    ) -> None:
        from torchrl_lang.modules.decoding.cache import RowCache  # transformers
        from torchrl_lang.modules.decoding.gpt2_step import GPT2Step

        self.features: RowFeatures | None = None
        self.snapshot = WeightSnapshot(trunks)
        self.size = size
        self.caches = [RowCache(size, rows=n) for _ in trunks]
        # Valid until the snapshot detects a change.
        self._steps = [GPT2Step(trunk) if GPT2Step.accepts(trunk) else None for trunk in trunks]
        self.tokens = torch.zeros(n, size, dtype=torch.int64, device=device)
        self.known = torch.zeros(n, dtype=torch.int64, device=device)  # number of cached tokens of each row
        self.place = torch.arange(n, device=device)  # the place in the batch of each row of the cache
        self.keep_states = keep_states
        self.kept: KeptStates | None = None  # where states below the first trained layer go when a row ends
        below = trunks[0].frozen_layers if keep_states and self._steps[0] is None else 0
        self.caches[0].kept_below = below
        self.states_name = str(states_name(trunks[0].model, below)) if below else None

    def steps(self, trunks: Sequence[Trunk]) -> list[GPT2Step | None]:
        """The fast step of each trunk; None if a model is no longer plain, e.g. has a new hook."""
        found = zip(self._steps, trunks, strict=True)
        return [step if step is not None and step.accepts(trunk) else None for step, trunk in found]

    def grow(self, size: int) -> None:
        """Make room for ``size`` tokens per row."""
        added = self.tokens.new_zeros(self.tokens.shape[0], size - self.size)
        self.tokens = torch.cat([self.tokens, added], -1)
        self.size = size
        for cache in self.caches:
            cache.grow(size)

    def move_to_front(self, active: Tensor | None) -> Tensor:
        """Move the active rows, bool ``[N]`` by place in the batch (None: all), to the front; their places, ``[M]``."""
        if active is None:
            return self.place.clone()
        moves = compaction(active[self.place])
        self.swap(moves)
        return self.place[: moves.order.shape[0]].clone()

    def swap(self, moves: Compaction) -> None:
        """Fill the places of rows that leave; these rows are behind the others from then on."""
        if moves.holes.shape[0] == 0:
            return
        from torchrl_lang.modules.decoding.cache import swap_rows  # transformers

        for values in (self.tokens, self.known, self.place, *(self.features or ())):
            swap_rows(values, moves.holes, moves.movers)
        for cache in self.caches:
            cache.swap(moves.holes, moves.movers)

    def keep_common_prefix(self, tokens: Tensor, length: Tensor, features: RowFeatures | None) -> None:
        """Drop cached tokens from the first difference to new rows ``[N, T]``; the last token is always read again.

        Rows whose features, which are before all tokens, are not those of the cache lose all.

        If no row continues, all rows return to their own places, so that the order of computation is that of a new
        actor.
        """
        width = min(tokens.shape[-1], self.size)
        position = torch.arange(width, device=tokens.device)
        limit = torch.minimum(self.known, length[self.place] - 1)
        same = (position < limit[:, None]) & (self.tokens[:, :width] == tokens[self.place, :width])
        common = torch.where(same, width, position).amin(-1)
        self._keep(common < self.known)
        self.known = common
        if features is not None:
            self.known = self.known * features.select(self.place).equals(self.features)
        if not bool(self.known.any()):
            self.place = torch.arange(tokens.shape[0], device=tokens.device)
        self.features = None if features is None else features.select(self.place)

    def stop_keeping(self) -> None:
        """Keep the states of what the rows have read so far, and none of later calls."""
        self._keep(self.known > 0)
        self.kept = None

    def _keep(self, rows: Tensor) -> None:
        """Keep the states of these cached rows, bool ``[N]``, if states are kept."""
        if self.kept is not None:
            for row in rows.nonzero().squeeze(-1).tolist():
                length = int(self.known[row])
                self.kept.add(self.tokens[row, :length], self.caches[0].kept_states(row, length))

    def read(self, tokens: Tensor, length: Tensor) -> None:
        """Record that the first rows are cached up to these lengths."""
        m, width = tokens.shape
        self.tokens[:m, :width] = tokens
        self.known[:m] = length

    def add(self, token: Tensor, position: Tensor) -> None:
        """Record one more token, int64 ``[M]``, of the first rows, at ``position`` ``[M]``."""
        m = token.shape[0]
        self.tokens[:m].scatter_(-1, position[:, None], token[:, None])
        self.known[:m] = position + 1


class PrefixCache:
    """Holds the :class:`Transcripts` of the last batch between two calls; copies and pickles are empty.

    Transcripts are removed while in use, so that a failed call, or a concurrent one in another thread, reads from the
    beginning.
    """

    def __init__(self) -> None:
        self.transcripts: Transcripts | None = None
        """Those to store for the next call."""
        self.keep_states = False
        self.kept: KeptStates | None = None
        """States below the first trained layer of the rows that calls with ``keep_states`` have read."""

    def clear(self) -> None:
        """Free all memory."""
        self.transcripts = self.kept = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the states of calls in this block, those of an earlier one no longer."""
        before, self.keep_states = self.keep_states, True
        self.kept = self.kept if before else None
        try:
            yield
        finally:
            self.keep_states = before
            if not before and self.transcripts is not None:
                self.transcripts.stop_keeping()

    def take(self, trunks: Sequence[Trunk], n: int, size: int, device: torch.device) -> Transcripts:
        """Transcripts of ``n`` rows with room for ``size`` tokens; empty ones for another batch or changed weights."""
        found, self.transcripts = self.transcripts, None
        if found is not None:
            fits = found.place.shape[0] == n and found.place.device == device and found.keep_states >= self.keep_states
            if not fits or not found.snapshot.unchanged(trunks):
                found.stop_keeping()
                found = None  # frees its memory before allocating
        if found is None:
            found = Transcripts(trunks, n, size, device, keep_states=self.keep_states)
        elif size > found.size:
            found.grow(max(size, found.size * 3 // 2))
        if self.keep_states and found.states_name is not None:
            if self.kept is None or self.kept.name != found.states_name:
                self.kept = KeptStates(found.states_name)
            found.kept = self.kept
        return found

    def __reduce__(self) -> tuple[type[PrefixCache], tuple[()]]:
        return PrefixCache, ()  # also used by deepcopy
