"""Evaluation mode of modules, and whether policies sample their actions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torchrl.envs.utils import ExplorationType, exploration_type

__all__ = ["eval_mode", "is_stochastic"]


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


def is_stochastic() -> bool:
    """Whether policies sample their actions here, by TorchRL's ``set_exploration_type``, or decode greedily."""
    return exploration_type() not in (ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN)
