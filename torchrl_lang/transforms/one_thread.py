"""What only one thread may do: switch the state of a module that others run, too."""

from __future__ import annotations

import threading
from typing import Any

import torch

__all__ = ["OneThread"]


class OneThread:
    """The thread that may: the one that made this, until it ends; of a copy, here or elsewhere, the first that comes.

    Examples:
        >>> from threading import Thread
        >>> from torchrl_lang.transforms.one_thread import OneThread
        >>> mine, passed = OneThread(), []
        >>> other = Thread(target=lambda: passed.append(mine.may()))
        >>> other.start(), other.join()
        (None, None)
        >>> mine.may(), passed
        (True, [False])
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = threading.current_thread()

    def may(self) -> bool:
        """Whether this is the thread. Within a compiled function nobody looks."""
        if torch.compiler.is_compiling():
            return True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.current_thread()
        return self._thread is threading.current_thread()

    def __getstate__(self) -> dict[str, Any]:
        return {"_thread": None}
