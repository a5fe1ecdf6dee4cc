"""The model as a decoder sees it: actor and, perhaps, a value trunk, read side by side."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.modules.actor import LOGITS, ActorParts
from torchrl_lang.modules.decoding.guidance import VALUE_PREFIX
from torchrl_lang.modules.decoding.readers import Reader, States, apply_head, make_reader, read_rows

__all__ = ["ModelReader", "states_at"]


class ModelReader(Reader):
    """Reads rows with all trunks of a model and evaluates the language-model head at the last token.

    Args:
        parts: of the actor.
        value_trunk: the values' own trunk, if any; its states are named ``value_…``.
        size: longest row.
        cached: False reads rows anew for every token.
    """

    def __init__(
        self, parts: ActorParts, value_trunk: TensorDictModuleBase | None, *, size: int, cached: bool = True
    ) -> None:
        self.parts = parts
        self.actor = make_reader(parts.trunk, size, cached=cached)
        self.value = None if value_trunk is None else make_reader(value_trunk, size, cached=cached)

    def start(self, tokens: Tensor, length: Tensor) -> States:
        """See :class:`Reader`."""
        value = {} if self.value is None else self.value.start(tokens, length)
        return _complete(self.parts, self.actor.start(tokens, length), value)

    def advance(self, token: Tensor, position: Tensor, visible: int) -> States:
        """See :class:`Reader`."""
        value = {} if self.value is None else self.value.advance(token, position, visible)
        return _complete(self.parts, self.actor.advance(token, position, visible), value)

    def select(self, rows: Tensor) -> None:
        """See :class:`Reader`."""
        self.actor.select(rows)
        if self.value is not None:
            self.value.select(rows)


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
