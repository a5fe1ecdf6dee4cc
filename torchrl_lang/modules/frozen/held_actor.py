"""What a frozen reference and the current policy have in common: an actor and the context in which to run it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

__all__ = ["HeldActor"]


class HeldActor(ABC):
    """An actor that a transform or loss runs without having its weights among its own parameters.

    It is no ``nn.Module``, so that an object that has it as an attribute does not register its weights.
    """

    actor: TensorDictModuleBase
    """The module to run."""
    differentiable: bool = False
    """Whether gradients flow through it."""
    _thread: int | None = None

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Any]:
        """The context in which to run the actor."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise if weights changed that must not change.

        Raises:
            RuntimeError: they did.
        """

    @abstractmethod
    def apply_to_owned(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn``, as ``nn.Module.to`` passes it down, to the weights that belong to this object."""

    def _in_own_thread(self) -> bool:
        """Whether this thread made this object or, for a copy, was the first that asked; True when compiling."""
        if torch.compiler.is_compiling():
            return True
        if self._thread is None:
            self._thread = threading.get_ident()
        return self._thread == threading.get_ident()
