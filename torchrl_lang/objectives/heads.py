"""The base of the losses with value heads: any module is a head, and is tried out when the loss is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from torchrl_lang.functional.precision import upcast_half
from torchrl_lang.modules.head_values import (
    ACTION_VALUE,
    STATE_VALUE,
    UTTERANCE_VALUE,
    checked_values,
    with_heads,
    zero_states,
)
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.trunk import HIDDEN
from torchrl_lang.objectives.base import RowLoss
from torchrl_lang.objectives.checks import model_vocabulary, state_width, vocabulary

__all__ = ["HeadLoss", "read_head"]

_KINDS = {ACTION_VALUE, UTTERANCE_VALUE, STATE_VALUE}


class _Head(NamedTuple):
    """The values that a loss expects of one of its heads."""

    values: str
    """``"action_value"``, ``"utterance_value"`` or ``"state_value"``: the field of ``tensor_keys``."""
    tried: bool
    """Whether its shapes have been looked at."""


class HeadLoss(RowLoss):
    """Base of the losses with value heads. Abstract, as :class:`RowLoss`.

    A head is a module of tensordicts, or any module ``hidden [N, H] -> values``. The loss reads the entry that
    ``set_keys`` names, or the only one that the head writes.
    """

    _heads: Mapping[str, _Head] = {}

    def _checked_head(
        self, name: str, network: Any, values: str, value_trunk: nn.Module | None = None
    ) -> TensorDictModule:
        """The head ``name`` as a module of tensordicts, after a look at what it writes for states of zeros."""
        if not isinstance(network, nn.Module):
            raise TypeError(
                f"{type(self).__name__} needs {name} as a module hidden [N, H] -> {values}, got "
                f"{type(network).__name__}."
            )
        if not isinstance(network, TensorDictModuleBase):
            network = TensorDictModule(network, in_keys=[getattr(network, "in_key", HIDDEN)], out_keys=[values])
        other = _KINDS - {values}
        if values not in network.out_keys and other & set(map(str, network.out_keys)):
            raise self._wrong_entry(name, network, values)
        self._heads = {**self._heads, name: _Head(values, tried=False)}
        states = self._zero_states(network, values, value_trunk)
        if states is not None:
            with torch.no_grad(), eval_mode(network):
                self._first_values(name, network, states)
        return network

    def _zero_states(
        self, network: TensorDictModuleBase, values: str, value_trunk: nn.Module | None
    ) -> TensorDict | None:
        """States ``[3, H]`` for a head; None where it cannot be tried out yet."""
        actor = getattr(self, "actor_network", None)
        if actor is None or (len(network.out_keys) > 1 and values not in network.out_keys):
            return None
        trunk = actor if value_trunk is None else value_trunk
        return zero_states(network.in_keys, state_width(actor, value_trunk), [trunk, network])

    def _head_key(self, name: str, network: TensorDictModuleBase | None = None) -> NestedKey:
        """The entry that a head writes its values to."""
        network, values = getattr(self, name) if network is None else network, self._heads[name].values
        key = getattr(self.tensor_keys, values)
        if key in network.out_keys:
            return key
        if len(network.out_keys) != 1:
            raise self._wrong_entry(name, network, key)
        return network.out_keys[0]

    def _wrong_entry(self, name: str, network: TensorDictModuleBase, key: NestedKey) -> ValueError:
        values = self._heads[name].values if name in self._heads else key
        return ValueError(
            f"{type(self).__name__} reads {key!r} of its {name}, which writes {list(network.out_keys)}: give it "
            f"out_keys=[{key!r}], or name the entry with set_keys({values}=...)."
        )

    def _read_head(self, name: str, states: TensorDictBase) -> Tensor:
        """The values of a head, see :func:`read_head`; in the first call with a look at their shape."""
        network, head = getattr(self, name), self._heads[name]
        if head.tried or torch.compiler.is_compiling():
            return read_head(network, states, self._head_key(name), head.values)
        return upcast_half(self._first_values(name, network, states))

    def _first_values(self, name: str, network: TensorDictModuleBase, states: TensorDictBase) -> Tensor:
        """The values of a head, or a ValueError unless they have their shape and the policy's vocabulary."""
        loss, values = type(self).__name__, self._heads[name].values
        key = self._head_key(name, network)
        found = checked_values(f"The {name} of {loss}", values, states, lambda: network(states.copy()).get(key))
        if values == ACTION_VALUE:
            self._check_vocabulary(found.shape[-1])
        self._heads = {**self._heads, name: _Head(values, tried=True)}
        return found

    def _check_vocabulary(self, known: int) -> None:
        """Raise ValueError unless Q has a value for every token that the policy can write, and for no unknown one."""
        needed, limit = vocabulary(self.actor_network), model_vocabulary(self.actor_network)
        if needed is not None and known < needed:
            raise ValueError(
                f"The Q network has values for {known} tokens and the policy can write {needed}: build the head with "
                f"vocab_size={needed}. Where the model's matrix is larger than its tokenizer's vocabulary, give the "
                "loss an UtteranceActor with vocab_size=, the tokenizer's."
            )
        if limit is not None and known > limit:
            raise ValueError(
                f"The Q network has values for {known} tokens and the model has {limit}: build the head with "
                f"vocab_size={limit}."
            )


def read_head(network: TensorDictModuleBase, states: TensorDictBase, key: NestedKey, values: str) -> Tensor:
    """The values that a head writes, at least in float32: ``[N, n_q, V]``, ``[N, n_q]`` or ``[N, 1]`` by their kind."""
    return upcast_half(with_heads(network(states.copy()).get(key), values))
