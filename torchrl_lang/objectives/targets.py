"""Target parameters of a loss: frozen copies that TorchRL's target updaters move, lent to a module for a pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tensordict import TensorDictBase, TensorDictParams
from torch import nn

__all__ = ["frozen_target", "lent"]


def frozen_target(params: TensorDictBase) -> TensorDictParams:
    """A copy of parameters that does not train."""
    return TensorDictParams(params.apply(lambda weight: weight.data.clone(), filter_empty=False), no_convert=True)


def lent(params: TensorDictBase, module: nn.Module) -> AbstractContextManager[Any]:
    """A context in which ``module`` computes with ``params`` as constants.

    It gets their ``.data``: what ``to_module`` lends itself comes back from the module as trainable parameters, from
    which no target updater can be made.
    """
    return params.data.to_module(module)
