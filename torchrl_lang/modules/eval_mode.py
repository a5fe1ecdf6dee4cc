"""Evaluation mode of modules, and whether policies sample their actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type

__all__ = ["applies_dropout", "eval_mode", "is_stochastic"]


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside a ``with`` block, then restore the mode of every submodule."""
    training = [m for m in module.modules() if m.training]
    try:
        for m in training:
            m.training = False
        yield
    finally:
        for m in training:
            m.training = True


def applies_dropout(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules, without those inside it, would apply dropout now."""
    training = [module for module in modules if module.training]
    # Attention keeps its rate as a number, as in self.attention_dropout; so do routers that jitter.
    rates = [rate for module in training for name, rate in vars(module).items() if "drop" in name or "jitter" in name]
    rates += [module.p for module in training if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def is_stochastic() -> bool:
    """Whether policies sample their actions here, by TorchRL's ``set_exploration_type``, or decode greedily."""
    return exploration_type() not in (ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN)
