"""Target parameters of a loss: frozen copies that TorchRL's target updaters move, lent to a module for a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_lang.modules.frozen.lower_layers import applies_dropout
from torchrl_lang.modules.hugging_face import eval_mode

__all__ = ["frozen_target", "lent", "part_of", "without_dropout"]


def frozen_target(params: TensorDictBase) -> TensorDictParams:
    """A copy of parameters that does not train."""
    return TensorDictParams(params.apply(lambda weight: weight.data.clone(), filter_empty=False), no_convert=True)


def part_of(params: TensorDictBase, module: nn.Module, part: nn.Module) -> TensorDictBase:
    """Of the parameters of ``module`` those of a module within it, or of a new sequence of modules within it."""
    names = {id(one): name for name, one in module.named_modules()}

    def of(one: nn.Module) -> TensorDictBase:
        if id(one) in names:
            return params.get(tuple(names[id(one)].split(".")), TensorDict())
        return TensorDict({name: of(child) for name, child in one.named_children()})

    return of(part)


@contextmanager
def lent(params: TensorDictBase, module: nn.Module) -> Iterator[None]:
    """A context in which ``module`` computes with ``params`` as constants, in evaluation mode.

    It gets their ``.data``: what ``to_module`` lends itself comes back from the module as trainable parameters, from
    which no target updater can be made. Dropout would make targets noisy, and the maximum of noisy values too large.
    """
    with params.data.to_module(module), eval_mode(module):
        yield


@torch.no_grad()
def without_dropout(trunk: TensorDictModuleBase, rows: TensorDictBase, written: TensorDictBase) -> TensorDictBase:
    """Compute the trunk's states that targets read: those of ``rows`` without dropout.

    That is ``written``, its output in the mode of training, unless it applies dropout now: that costs another pass.
    """
    if not applies_dropout(trunk.modules()):
        return written
    with eval_mode(trunk):
        return trunk(rows.copy())
