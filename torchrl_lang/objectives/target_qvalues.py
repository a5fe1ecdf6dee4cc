"""The base of the losses with a Q network and its target parameters."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

from tensordict import NestedKey, TensorDictParams
from tensordict.nn import TensorDictModule
from torch.nn import Parameter

from torchrl_lang.objectives.base import RowLoss
from torchrl_lang.objectives.checks import check_head

__all__ = ["TargetQLoss"]


class TargetQLoss(RowLoss):
    """Base of the losses whose Q heads are functional, with target parameters that TorchRL's target updaters find.

    Abstract, as :class:`RowLoss`.
    """

    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams

    def _set_qvalue(self, qvalue_network: TensorDictModule, key: NestedKey) -> None:
        """Check that the Q network writes ``key``, and make it functional."""
        check_head(type(self).__name__, "qvalue_network", qvalue_network, key)
        self.convert_to_functional(qvalue_network, "qvalue_network", create_target_params=True)

    def target_qvalue_network(self) -> TensorDictModule:
        """The Q network with the target parameters, as a module of its own that shares them and follows them.

        For a :class:`~torchrl_lang.modules.ValueGuidance` or another policy that reads values.
        """
        network = deepcopy(self.qvalue_network)
        # Parameters of its own over the same memory, so that it has a state_dict and can be saved.
        frozen = self.target_qvalue_network_params.data.apply(partial(Parameter, requires_grad=False))
        frozen.to_module(network, preserve_module_state=False)
        return network
