"""The base of the losses with a Q network and its target parameters."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

from tensordict import TensorDictParams
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import Parameter

from torchrl_lang.objectives.heads import HeadLoss

__all__ = ["TargetQLoss"]


class TargetQLoss(HeadLoss):
    """Base of the losses whose Q heads are functional, with target parameters that TorchRL's target updaters find.

    Abstract, as :class:`RowLoss`.
    """

    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams

    def _set_qvalue(self, qvalue_network: nn.Module, values: str, value_trunk: nn.Module | None = None) -> None:
        """Check the Q network, which writes ``values``, and make it functional."""
        network = self._checked_head("qvalue_network", qvalue_network, values, value_trunk)
        if next(network.parameters(), None) is None:
            raise ValueError(
                f"The qvalue_network of {type(self).__name__} has no parameters: give it the module that holds them, "
                "not a function that calls one."
            )
        self.convert_to_functional(network, "qvalue_network", create_target_params=True)

    def target_qvalue_network(self) -> TensorDictModule:
        """The Q network with the target parameters, as a module of its own that shares them and follows them.

        For a :class:`~torchrl_lang.modules.ValueGuidance` or another policy that reads values, by this library's key.
        """
        network = deepcopy(self.qvalue_network)
        # Parameters of its own over the same memory, so that it has a state_dict and can be saved.
        frozen = self.target_qvalue_network_params.data.apply(partial(Parameter, requires_grad=False))
        frozen.to_module(network, preserve_module_state=False)
        values = self._heads["qvalue_network"].values
        if type(network) is TensorDictModule and network.out_keys != [values] and len(network.out_keys) == 1:
            return TensorDictModule(network.module, in_keys=network.in_keys, out_keys=[values])
        return network
