"""Actors that a transform or loss runs: what they have in common, and the current policy."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from torchrl_lang.modules.eval_mode import eval_mode

__all__ = ["CurrentPolicy", "HeldActor"]


class HeldActor(ABC):
    """An actor that a transform or loss runs without having its weights among its own parameters.

    It is no ``nn.Module``, so that an object that has it as an attribute does not register its weights.
    """

    def __init__(self, actor: TensorDictModuleBase) -> None:
        self.actor = actor
        """The module to run."""
        self._thread: int | None = threading.get_ident()

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Any]:
        """The context in which to run the actor."""

    def _in_own_thread(self) -> bool:
        """Whether this thread made this object or, for a copy, was the first that asked; True when compiling."""
        if torch.compiler.is_compiling():
            return True
        if self._thread is None:
            self._thread = threading.get_ident()
        return self._thread == threading.get_ident()


class CurrentPolicy(HeldActor):
    """An actor that continues to train, run without gradients and in evaluation mode.

    The actor is not copied, moved or registered: it belongs to the caller. A copy or pickle would differ from the
    policy after the next training step, so it refuses to run. Evaluation mode affects all threads: the thread that made
    this object may switch it, others may run the policy only while every module is in evaluation mode.

    Args:
        actor: the policy.
    """

    def __init__(self, actor: TensorDictModuleBase) -> None:
        super().__init__(actor)
        self._original = True

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """The context in which to run the policy.

        Raises:
            RuntimeError: this is a copy, or this is another thread than the one that made it and the policy is in
                training mode.
        """
        if not self._original:
            raise RuntimeError(
                "This is a copy of the policy, made when the transform was copied or sent to another process, and "
                "would not be trained. Keep the policy's log-probability (return_log_prob=True) and the parameters of "
                "its distribution in the data, or use the transform in the training process."
            )
        if not self._in_own_thread() and any(module.training for module in self.actor.modules()):
            raise RuntimeError(
                "Running the policy here would switch it from training to evaluation mode for all threads, and this is "
                "another thread than the one that trains it (for instance of a replay buffer with prefetch=). Keep the "
                "policy's log-probability and the parameters of its distribution in the data, use no prefetch=, call "
                "the transform in the training loop, or keep the policy in evaluation mode (policy.eval())."
            )
        with torch.no_grad(), eval_mode(self.actor):
            yield

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_original": False, "_thread": None}
