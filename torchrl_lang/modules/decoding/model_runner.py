"""Model runners: the states of the last token of each row, token by token, with a cache or by recomputation."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.modules.actor import LOGITS, ActorParts
from torchrl_lang.modules.decoding.guidance import VALUE_STATES
from torchrl_lang.modules.decoding.prefix_cache import Compaction, Transcripts
from torchrl_lang.modules.features import RowFeatures, reads_features, take
from torchrl_lang.modules.head_values import States, apply_head
from torchrl_lang.modules.row_groups import shared_prefix
from torchrl_lang.modules.trunk import HIDDEN, Trunk, trunk_of
from torchrl_lang.schema import ATTENTION_MASK, FROZEN_STATES, TOKENS

if TYPE_CHECKING:
    from torchrl_lang.modules.decoding.cache import RowCache
    from torchrl_lang.modules.decoding.gpt2_step import GPT2Step

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
        >>> from torchrl_lang.modules.decoding.model_runner import prefill_chunks
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


class CachedRunner:
    """Reads every token once, through a :class:`RowCache`. The features of a row are in its first slots.

    Args:
        trunk: the model.
        cache: has room for all tokens and features; may contain the beginnings of the rows.
        size: maximal row length, at most (and by default) the cache's size; copies of rows have this much room.
        step: a faster implementation of a step; by default :class:`GPT2Step` if it applies.
        features: of the rows; a trunk that reads none ignores them.
    """

    def __init__(
        self,
        trunk: Trunk,
        cache: RowCache,
        size: int | None = None,
        *,
        step: GPT2Step | None = None,
        features: RowFeatures | None = None,
    ) -> None:
        from torchrl_lang.modules.decoding.gpt2_step import GPT2Step  # transformers

        self.trunk, self.cache = trunk, cache
        self.features = None if trunk.features is None else features
        self._places = 0 if self.features is None else self.features.places
        self._count = None if self.features is None else self.features.number
        self.size = None if size is None else size + self._places
        self._step = GPT2Step(trunk) if step is None and GPT2Step.accepts(trunk) else step

    def prefill(self, tokens: Tensor, length: Tensor, known: Tensor | None = None) -> States:
        """Read prompts; see :meth:`LanguageModelRunner.prefill`."""
        if self.features is not None and self._count is not None:
            tokens, length = self.trunk.embed(tokens, self.features), length + self._count
            known = None if known is None else torch.where(known > 0, known + self._count, 0)
        else:
            known = self._share(tokens, length, known)
        whole = [PrefillChunk(None, tokens.shape[1], tokens.shape[1])]
        chunks = whole if known is None else prefill_chunks(length, known)
        if len(chunks) == 1:
            return {HIDDEN: self._read(tokens, length, chunks[0], self._count)}
        read = []
        for chunk in chunks:
            count = None if self._count is None else self._count[chunk.rows]
            read.append(self._read(tokens[chunk.rows], length[chunk.rows], chunk, count))
        back = torch.cat([chunk.rows for chunk in chunks if chunk.rows is not None]).argsort()
        return {HIDDEN: torch.cat(read)[back]}

    def decode(self, token: Tensor, position: Tensor, visible: int) -> States:
        """Read one more token of each row."""
        only, slot = torch.zeros_like(token), position if self._count is None else position + self._count
        at = slot.unsqueeze(-1)
        options = {} if self._count is None else {"position_ids": self.trunk.position_ids(at, self._count)}
        return {HIDDEN: self._extend(token.unsqueeze(-1), at, visible + self._places, only, **options)}

    def reorder(self, rows: Tensor) -> None:
        """Continue with these rows, which may repeat."""
        self.cache = self.cache.reordered(rows, self.size)
        self._count = None if self._count is None else self._count[rows]

    def compact(self, moves: Compaction, *, moved: bool = False) -> None:
        """Continue with ``moves.order``; ``moved`` means that the cache has been changed so."""
        if not moved:
            self.cache.swap(moves.holes, moves.movers)
        self._count = None if self._count is None else self._count[moves.order]

    def _share(self, tokens: Tensor, length: Tensor, known: Tensor | None) -> Tensor | None:
        """Read once what several rows that are not in the cache begin with; the new ``known``."""
        if not self.trunk.share_prefixes:
            return known
        before = torch.zeros_like(length) if known is None else known
        new = (before == 0).nonzero().squeeze(-1)
        if (found := shared_prefix(tokens[new], length[new])) is None:
            return known
        first, cut = new[found.first], found.width
        self.cache.reserve(tokens.shape[0])
        self._extend(tokens[first, :cut], None, None, torch.zeros_like(first), rows=first)
        self.cache.copy_front(cut, first[found.group], new)
        return before.index_copy(0, new, (length[new] - 1).clamp_max(cut))

    def _read(self, tokens: Tensor, length: Tensor, chunk: PrefillChunk, count: Tensor | None) -> Tensor:
        """Read the chunk's part of rows of tokens ``[N, q]``, or embedded with ``count`` features, ``[N, q, H]``."""
        begin: Tensor | None = None
        if chunk.width < chunk.longest:
            # The last tokens of each row, so that all end together; tokens in the cache may be read a second time.
            begin = (length - chunk.width).clamp_min(0)
        slots = torch.arange(chunk.width, device=tokens.device)
        slots = slots if begin is None else begin[:, None] + slots
        options: dict[str, Any] = {"rows": chunk.rows}
        if count is not None:
            options["position_ids"] = self.trunk.position_ids(slots, count)
        if begin is None:  # from the beginning: the fast causal kernel, without a mask
            return self._extend(tokens[:, : chunk.width], None, None, length - 1, **options)
        return self._extend(take(tokens, slots), slots, chunk.longest, length - 1 - begin, **options)

    def _extend(
        self, tokens: Tensor, positions: Tensor | None, visible: int | None, last: Tensor, **options: Any
    ) -> Tensor:
        """Read tokens ``[N, q]``, see :meth:`RowCache.extend`; the states of the ``last`` of each row, ``[N, H]``."""
        if self._step is not None and self._step.applies(tokens):
            return self._step(self.cache, tokens, positions, visible, last, **options)
        states = self.cache.extend(self.trunk, tokens, positions, visible, **options)
        return states[torch.arange(tokens.shape[0], device=tokens.device), last]


class RecomputingRunner:
    """Reads each row from its beginning for every token: slow, but correct for any trunk."""

    def __init__(self, trunk: TensorDictModuleBase, size: int, features: RowFeatures | None = None) -> None:
        self.trunk, self.size, self.features = trunk, size, features

    def prefill(self, tokens: Tensor, length: Tensor, known: Tensor | None = None) -> States:
        """Read prompts; see :meth:`LanguageModelRunner.prefill`."""
        self.tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], self.size - tokens.shape[1])], -1)
        return self._read(length - 1, tokens.shape[1])

    def decode(self, token: Tensor, position: Tensor, visible: int) -> States:
        """Read one more token of each row."""
        self.tokens[torch.arange(token.shape[0], device=token.device), position] = token
        return self._read(position, visible)

    def reorder(self, rows: Tensor) -> None:
        """Continue with these rows, which may repeat."""
        self.tokens = self.tokens.index_select(0, rows)
        self.features = None if self.features is None else self.features.select(rows)

    def compact(self, moves: Compaction, *, moved: bool = False) -> None:
        """Continue with ``moves.order``."""
        self.reorder(moves.order)

    def _read(self, position: Tensor, width: int) -> States:
        attention = torch.arange(width, device=position.device) <= position[:, None]
        states = read_rows(self.trunk, self.tokens[:, :width], attention, self.features)
        row = torch.arange(position.shape[0], device=position.device)
        return {key: value[row, position] for key, value in states.items()}


def warn_uncached(trunks: Iterable[TensorDictModuleBase | None]) -> None:
    """Warn, once per process and kind of model, about models that cannot read rows incrementally."""
    for trunk in trunks:
        model = trunk_of(trunk)
        if model is not None and model.cache_obstacle is not None:
            _warn_once(type(model.model).__name__, model.cache_obstacle)


@cache
def _warn_once(model: str, obstacle: str) -> None:
    warnings.warn(f"{model} decodes without a key-value cache, each token by its whole row: {obstacle}.", stacklevel=2)


def read_rows(
    trunk: TensorDictModuleBase,
    tokens: Tensor,
    attention_mask: Tensor,
    features: RowFeatures | None = None,
    frozen: TensorDictBase | None = None,
) -> States:
    """All floating-point states that a trunk writes for whole rows, each ``[N, T, …]``.

    A trunk that reads no features gets none. What the rows carry as ``frozen_states`` saves its lower layers.
    """
    rows = TensorDict({TOKENS: tokens, ATTENTION_MASK: attention_mask}, batch_size=tokens.shape[:1])
    if features is not None and reads_features(trunk):
        rows.update(features.entries())
    if frozen is not None:
        rows.set(FROZEN_STATES, frozen)
    out = trunk(rows)
    return {key: out.get(key) for key in trunk.out_keys if isinstance(key, tuple) or not key.startswith("_")}


class LanguageModelRunner:
    """Runs all trunks of a model on rows of up to ``size`` tokens and evaluates the head at the last token.

    States of a separate ``value_trunk`` are named ``value_…``. Without ``cached`` the whole row is read for each token.
    New tokens are added to the ``transcripts``, the cached parts of these rows. The ``features`` of the rows go to the
    trunks that read some.
    """

    def __init__(
        self,
        parts: ActorParts,
        value_trunk: TensorDictModuleBase | None,
        *,
        size: int,
        cached: bool,
        transcripts: Transcripts | None = None,
        features: RowFeatures | None = None,
    ) -> None:
        from torchrl_lang.modules.decoding.cache import RowCache  # transformers

        self.parts, self.transcripts = parts, transcripts
        self.runners: list[CachedRunner | RecomputingRunner] = []
        slots = size + (0 if features is None else features.places)
        steps = [] if transcripts is None else transcripts.steps(cacheable_trunks(parts, value_trunk))
        for i, trunk in enumerate(trunk for trunk in (parts.trunk, value_trunk) if trunk is not None):
            model = trunk_of(trunk) if cached else None
            if transcripts is not None and model is not None:
                self.runners.append(CachedRunner(model, transcripts.caches[i], size, step=steps[i], features=features))
            elif model is not None and model.cache_obstacle is None:
                self.runners.append(CachedRunner(model, RowCache(slots), features=features))
            else:
                self.runners.append(RecomputingRunner(trunk, size, features))

    def prefill(self, tokens: Tensor, length: Tensor, known: Tensor | None = None) -> States:
        """Read prompts, int64 ``[N, T]`` with ``length`` ``[N]`` (at least 1) real tokens each.

        ``known``, int64 ``[N]``, is the number of tokens of each row that are in the cache; that of the transcripts,
        if there are some.
        """
        if self.transcripts is not None:
            known = self.transcripts.known[: length.shape[0]].clone()
            self.transcripts.read(tokens, length)
        return self._complete([runner.prefill(tokens, length, known) for runner in self.runners])

    def decode(self, token: Tensor, position: Tensor, visible: int) -> States:
        """Read one more token of each row, int64 ``[N]``, at ``position`` ``[N]``, all below ``visible``."""
        states = [runner.decode(token, position, visible) for runner in self.runners]
        if self.transcripts is not None:
            self.transcripts.add(token, position)
        return self._complete(states)

    def reorder(self, rows: Tensor) -> None:
        """Continue with these rows, int64 ``[M]``, which may repeat.

        Tokens that copies of rows read later are not added to the transcripts.
        """
        self.transcripts = None
        for runner in self.runners:
            runner.reorder(rows)

    def compact(self, moves: Compaction, *, moved: bool = False) -> None:
        """Continue with ``moves.order``, with fewer copies than :meth:`reorder`.

        Tokens of the rows that leave stay in the transcripts.
        """
        if self.transcripts is not None:
            self.transcripts.swap(moves)
        for runner in self.runners:
            runner.compact(moves, moved=moved or self.transcripts is not None)

    def _complete(self, states: list[States]) -> States:
        """The states of all trunks, and the logits."""
        own, *value = states
        if self.parts.head is not None:
            own[LOGITS] = apply_head(self.parts.head, own, LOGITS)
        return own | {VALUE_STATES + key: tensor for part in value for key, tensor in part.items()}


def cacheable_trunks(parts: ActorParts, value_trunk: TensorDictModuleBase | None) -> list[Trunk]:
    """All trunks of a model; none if one of them cannot read rows incrementally."""
    models = [trunk_of(trunk) for trunk in (parts.trunk, value_trunk) if trunk is not None]
    found = [model for model in models if model is not None and model.cache_obstacle is None]
    return found if len(found) == len(models) else []
