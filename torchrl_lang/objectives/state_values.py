"""The base of the losses with a V head that is an ordinary module beside the policy."""

from __future__ import annotations

from dataclasses import dataclass

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor

from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.head_values import STATE_VALUE
from torchrl_lang.objectives.base import gather_inputs
from torchrl_lang.objectives.heads import HeadLoss

__all__ = ["StateValueLoss"]


class StateValueLoss(HeadLoss):
    """Base of the losses with a V head and no target of it. Abstract, as :class:`HeadLoss`."""

    @dataclass
    class _AcceptedKeys(HeadLoss._AcceptedKeys):
        """The keys of :class:`RowLoss` and that of the state value."""

        state_value: NestedKey = STATE_VALUE

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    value_network: TensorDictModule
    value_trunk: TensorDictModuleBase | None
    """The values' own trunk; None where they read the actor's."""
    detach_value: bool
    """No gradient flows from V into the trunk."""

    def _value_states(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows with the states that the values' trunk writes."""
        trunk = split_actor(self.language_actor).trunk if self.value_trunk is None else self.value_trunk
        return trunk(rows.copy())

    def _values(self, states: TensorDictBase, place: Tensor) -> Tensor:
        """V at places of the flattened batch, ``[N]``."""
        inputs = gather_inputs(self.value_network.in_keys, states, place)
        return self._read_head("value_network", inputs.detach() if self.detach_value else inputs).squeeze(-1)
