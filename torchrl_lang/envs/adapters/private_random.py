"""Global random streams that a game of another library has for itself."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_GLOBAL_STREAMS = threading.RLock()


class PrivateRandom:
    """States of Python's and NumPy's global random streams that belong to one game.

    Inside ``with private.active():`` the global streams continue where this game left them; afterwards they are what
    they were before, so that neither other games nor the caller's code are disturbed. Streams are global to the
    process: the block waits until no other thread is in one, so that such games gain from processes, not from threads.

    Examples:
        >>> import random
        >>> from torchrl_lang.envs.adapters.private_random import PrivateRandom
        >>> private = PrivateRandom()
        >>> private.seed(3)
        >>> with private.active():
        ...     first = random.random()
        >>> random.Random(3).random() == first
        True
    """

    _states: tuple[Any, Any]

    def seed(self, seed: int) -> None:
        """Begin both streams at a seed."""
        self._states = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this game's streams the global ones inside the block."""
        with _GLOBAL_STREAMS:
            before = _swap(self._states)
            try:
                yield
            finally:
                self._states = _swap(before)


def _swap(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """Replace the states of the global streams; returns what they were."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global stream is what games use)
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    return before
