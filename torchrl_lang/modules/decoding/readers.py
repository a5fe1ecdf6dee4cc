"""Readers: what a model makes of the last token of each row, token after token, with a cache or by reading anew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang.modules.decoding.cache import RowCache
from torchrl_lang.modules.trunk import HIDDEN, HIDDEN_PRE_NORM, Trunk
from torchrl_lang.schema import ATTENTION_MASK, TOKENS

__all__ = ["CachedReader", "Reader", "RecomputingReader", "States", "apply_head", "make_reader"]

States = dict[str, Tensor]
"""What a trunk says of one position of each row: ``hidden``, ``hidden_pre_norm`` or ``logits``, each ``[N, …]``."""


class Reader(ABC):
    """Reads a batch of rows and gives the states of each row's last token."""

    @abstractmethod
    def start(self, tokens: Tensor, length: Tensor) -> States:
        """Read prompts, int64 ``[N, P]`` with ``length`` ``[N]`` (at least 1) real tokens each."""

    @abstractmethod
    def advance(self, token: Tensor, position: Tensor, visible: int) -> States:
        """Read one more token of each row, int64 ``[N]``, at ``position`` ``[N]``, all below ``visible``."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Go on with these rows, int64 ``[M]``, some perhaps more than once."""


class CachedReader(Reader):
    """Reads every token once, through a :class:`RowCache` with ``size`` slots."""

    def __init__(self, trunk: Trunk, size: int) -> None:
        self.trunk = trunk
        self.cache = RowCache(size)

    def start(self, tokens: Tensor, length: Tensor) -> States:
        """See :class:`Reader`."""
        row = torch.arange(tokens.shape[0], device=tokens.device)
        states = self.cache.extend(self.trunk, tokens)
        return self._named(*(state[row, length - 1] for state in states))

    def advance(self, token: Tensor, position: Tensor, visible: int) -> States:
        """See :class:`Reader`."""
        states = self.cache.extend(self.trunk, token.unsqueeze(-1), position.unsqueeze(-1), visible)
        return self._named(*(state.squeeze(1) for state in states))

    def select(self, rows: Tensor) -> None:
        """See :class:`Reader`."""
        self.cache.select(rows)

    @staticmethod
    def _named(*states: Tensor) -> States:
        return dict(zip((HIDDEN, HIDDEN_PRE_NORM), states, strict=False))


class RecomputingReader(Reader):
    """Reads each row again from its beginning for every token: slow, but right for any trunk."""

    def __init__(self, trunk: TensorDictModuleBase, size: int) -> None:
        self.trunk = trunk
        self.size = size

    def start(self, tokens: Tensor, length: Tensor) -> States:
        """See :class:`Reader`."""
        self.tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], self.size - tokens.shape[1])], -1)
        return self._read(length - 1, tokens.shape[1])

    def advance(self, token: Tensor, position: Tensor, visible: int) -> States:
        """See :class:`Reader`."""
        self.tokens[torch.arange(token.shape[0], device=token.device), position] = token
        return self._read(position, visible)

    def select(self, rows: Tensor) -> None:
        """See :class:`Reader`."""
        self.tokens = self.tokens.index_select(0, rows)

    def _read(self, position: Tensor, width: int) -> States:
        attention = torch.arange(width, device=position.device) <= position[:, None]
        states = read_rows(self.trunk, self.tokens[:, :width], attention)
        row = torch.arange(position.shape[0], device=position.device)
        return {key: value[row, position] for key, value in states.items()}


def make_reader(trunk: TensorDictModuleBase, size: int, *, cached: bool) -> Reader:
    """A reader of rows of up to ``size`` tokens; cached where asked for and possible."""
    model = getattr(trunk, "module", None)
    if cached and isinstance(model, Trunk) and model.supports_cache:
        return CachedReader(model, size)
    return RecomputingReader(trunk, size)


def read_rows(trunk: TensorDictModuleBase, tokens: Tensor, attention_mask: Tensor) -> States:
    """All floating-point states that a trunk writes for whole rows, each ``[N, T, …]``."""
    rows = TensorDict({TOKENS: tokens, ATTENTION_MASK: attention_mask}, batch_size=tokens.shape[:1])
    out = trunk(rows)
    return {key: out.get(key) for key in trunk.out_keys if isinstance(key, str) and not key.startswith("_")}


def apply_head(head: nn.Module, states: Mapping[str, Tensor], out_key: str) -> Tensor:
    """Run a head on states: a module of tensordicts by its keys, any other on the state it names as ``in_key``.

    Raises:
        KeyError: the trunk does not write what the head reads.
    """
    if isinstance(head, TensorDictModuleBase):
        keys: Any = head.in_keys
        if type(head) is TensorDictModule and len(keys) == 1 and len(head.out_keys) == 1:
            return head.module(_read(states, keys[0], head.module))  # the same, without a tensordict for every token
        inputs = {key: _read(states, key, head) for key in keys}
        return head(TensorDict(inputs, batch_size=next(iter(inputs.values())).shape[:1])).get(out_key)
    return head(_read(states, str(getattr(head, "in_key", HIDDEN)), head))


def _read(states: Mapping[str, Tensor], key: str, head: nn.Module) -> Tensor:
    if key not in states:
        advice = "give the head a trunk that writes it"
        if key == HIDDEN_PRE_NORM:
            advice = "build the actor with language_actor(lm, expose_pre_norm=True), a value trunk likewise"
        raise KeyError(f"{type(head).__name__} reads '{key}' but the model writes {sorted(states)}: {advice}.")
    return states[key]
