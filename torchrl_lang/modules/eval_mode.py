"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["eval_mode"]


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every submodule has its own flag again.

    Examples:
        >>> from torch import nn
        >>> from torchrl_lang.modules.eval_mode import eval_mode
        >>> net = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with eval_mode(net):
        ...     net[0].training
        False
        >>> net[0].training, net[1].training
        (True, False)
    """
    training = [m for m in module.modules() if m.training]
    try:
        for m in training:
            m.training = False
        yield
    finally:
        for m in training:
            m.training = True
