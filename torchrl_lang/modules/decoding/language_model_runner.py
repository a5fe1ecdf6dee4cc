"""The model runner of an actor and, optionally, a separate value trunk."""

from __future__ import annotations

from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.modules.actor import LOGITS, ActorParts
from torchrl_lang.modules.decoding.guidance import VALUE_STATES
from torchrl_lang.modules.decoding.model_runner import (
    CachedRunner,
    ModelRunner,
    States,
    apply_head,
    cacheable,
    make_runner,
)
from torchrl_lang.modules.decoding.prefix_cache import Compaction, Transcripts
from torchrl_lang.modules.features import RowFeatures
from torchrl_lang.modules.trunk import Trunk

__all__ = ["LanguageModelRunner", "cacheable_trunks"]


class LanguageModelRunner(ModelRunner):
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
        self.parts = parts
        self.transcripts = transcripts
        self.runners: list[ModelRunner]
        trunks = [parts.trunk] if value_trunk is None else [parts.trunk, value_trunk]
        if transcripts is None:
            self.runners = [make_runner(trunk, size, cached=cached, features=features) for trunk in trunks]
        else:
            models = cacheable_trunks(parts, value_trunk)
            kept = zip(models, transcripts.caches, transcripts.steps(models), strict=True)
            self.runners = [
                CachedRunner(trunk, cache, size, step=step, features=features) for trunk, cache, step in kept
            ]

    def prefill(self, tokens: Tensor, length: Tensor, known: Tensor | None = None) -> States:
        """See :class:`ModelRunner`; ``known`` is that of the transcripts."""
        if self.transcripts is not None:
            known = self.transcripts.known[: length.shape[0]].clone()
            self.transcripts.read(tokens, length)
        return self._complete([runner.prefill(tokens, length, known) for runner in self.runners])

    def decode(self, token: Tensor, position: Tensor, visible: int) -> States:
        """See :class:`ModelRunner`."""
        states = [runner.decode(token, position, visible) for runner in self.runners]
        if self.transcripts is not None:
            self.transcripts.add(token, position)
        return self._complete(states)

    def reorder(self, rows: Tensor) -> None:
        """See :class:`ModelRunner`. Tokens that copies of rows read later are not added to the transcripts."""
        self.transcripts = None
        for runner in self.runners:
            runner.reorder(rows)

    def compact(self, moves: Compaction, *, moved: bool = False) -> None:
        """See :class:`ModelRunner`. Tokens of the rows that leave stay in the transcripts."""
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
    found = [cacheable(trunk) for trunk in (parts.trunk, value_trunk) if trunk is not None]
    models = [model for model in found if model is not None]
    return models if len(models) == len(found) else []
