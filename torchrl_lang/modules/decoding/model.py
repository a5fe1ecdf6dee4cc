"""The model as a decoder sees it: actor and, perhaps, a value trunk, read side by side."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.modules.actor import LOGITS, ActorParts
from torchrl_lang.modules.decoding.guidance import VALUE_PREFIX
from torchrl_lang.modules.decoding.memory import Departure, Transcripts
from torchrl_lang.modules.decoding.pieces import pieces
from torchrl_lang.modules.decoding.readers import (
    CachedReader,
    Reader,
    States,
    apply_head,
    cacheable,
    make_reader,
    read_rows,
)
from torchrl_lang.modules.trunk import Trunk

__all__ = ["ModelReader", "cacheable_trunks", "states_at"]


class ModelReader(Reader):
    """Reads rows with all trunks of a model and evaluates the language-model head at the last token.

    Args:
        parts: of the actor.
        value_trunk: the values' own trunk, if any; its states are named ``value_…``.
        size: longest row.
        cached: False reads rows anew for every token.
        transcripts: these rows as far as they have been read, for :func:`cacheable_trunks`; what is read is added.
    """

    def __init__(
        self,
        parts: ActorParts,
        value_trunk: TensorDictModuleBase | None,
        *,
        size: int,
        cached: bool = True,
        transcripts: Transcripts | None = None,
    ) -> None:
        self.parts = parts
        self.transcripts = transcripts
        self.readers: list[Reader]
        trunks = [parts.trunk] if value_trunk is None else [parts.trunk, value_trunk]
        if transcripts is None:
            self.readers = [make_reader(trunk, size, cached=cached) for trunk in trunks]
        else:
            models = cacheable_trunks(parts, value_trunk)
            kept = zip(models, transcripts.caches, transcripts.steps(models), strict=True)
            self.readers = [CachedReader(trunk, cache, size, step=step) for trunk, cache, step in kept]

    def start(self, tokens: Tensor, length: Tensor) -> States:
        """See :class:`Reader`."""
        if self.transcripts is None:
            return self._complete([reader.start(tokens, length) for reader in self.readers])
        plan = pieces(length, self.transcripts.known[: length.shape[0]])
        states = [reader.resume(tokens, length, plan) for reader in self.readers if isinstance(reader, CachedReader)]
        self.transcripts.read(tokens, length)
        return self._complete(states)

    def advance(self, token: Tensor, position: Tensor, visible: int) -> States:
        """See :class:`Reader`."""
        states = [reader.advance(token, position, visible) for reader in self.readers]
        if self.transcripts is not None:
            self.transcripts.add(token, position)
        return self._complete(states)

    def select(self, rows: Tensor) -> None:
        """See :class:`Reader`. What copies of rows read from now on is not remembered."""
        self.transcripts = None
        for reader in self.readers:
            reader.select(rows)

    def leave(self, moves: Departure) -> None:
        """See :class:`Reader`. What the rows that leave have read stays remembered."""
        if self.transcripts is not None:
            self.transcripts.swap(moves)
        else:
            for reader in self.readers:
                reader.leave(moves)

    def _complete(self, states: list[States]) -> States:
        return _complete(self.parts, states[0], states[1] if len(states) > 1 else {})


def cacheable_trunks(parts: ActorParts, value_trunk: TensorDictModuleBase | None) -> list[Trunk]:
    """All trunks of a model, none where one of them cannot read rows piece by piece."""
    found = [cacheable(trunk) for trunk in (parts.trunk, value_trunk) if trunk is not None]
    models = [model for model in found if model is not None]
    return models if len(models) == len(found) else []


def states_at(
    parts: ActorParts,
    value_trunk: TensorDictModuleBase | None,
    tokens: Tensor,
    length: Tensor,
    row: Tensor,
    position: Tensor,
) -> States:
    """The states at ``M`` chosen places of whole rows, by one pass of each trunk and the head only there.

    Args:
        parts: of the actor.
        value_trunk: the values' own trunk, if any.
        tokens: int64 ``[N, T]``.
        length: int64 ``[N]``, real tokens.
        row: int64 ``[M]``.
        position: int64 ``[M]``.
    """
    attention = torch.arange(tokens.shape[-1], device=tokens.device) < length[:, None]

    def read(trunk: TensorDictModuleBase) -> States:
        return {key: value[row, position] for key, value in read_rows(trunk, tokens, attention).items()}

    return _complete(parts, read(parts.trunk), {} if value_trunk is None else read(value_trunk))


def _complete(parts: ActorParts, states: States, value: States) -> States:
    if parts.head is not None:
        states[LOGITS] = apply_head(parts.head, states, LOGITS)
    return states | {VALUE_PREFIX + key: tensor for key, tensor in value.items()}
