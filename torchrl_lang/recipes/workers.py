"""Worker processes that end with their parent, not with a signal to its group, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from multiprocessing.synchronize import SemLock  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

from torchrl.weight_update import SharedMemWeightSyncScheme

__all__ = ["end_scheme", "end_with_parent", "is_alive", "starting_workers"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def starting_workers() -> Iterator[None]:
    """Start worker processes in this block, by ``spawn``; when it ends they must have loaded what they were sent.

    - Workers are born with SIGINT and SIGTERM blocked: Ctrl-C reaches the whole group of processes, and a worker that
      dies of it in the midst of a message takes the others along. Their parent ends them.
    - Signals that come meanwhile are kept for the end of the block, when there is something that can be closed.
    - The names of semaphores are removed from shared memory as soon as all have opened them. What no longer has a name
      ends with the last process that uses it, however all of them end.
    """
    resource_tracker.ensure_running()  # else the first worker would start it, which unblocks the signals
    before = set(util._finalizer_registry)  # type: ignore[attr-defined]
    with _kept_signals():
        yield
        _forget_names(before)


def end_with_parent(parent: int) -> None:
    """End this process, even one that hangs, soon after its parent is gone. (Workers' ``init_fn``.)"""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_scheme(scheme: SharedMemWeightSyncScheme) -> None:
    """End what TorchRL 0.14's collectors do not end: left to the interpreter's exit it starts threads, for ever."""
    for name in ("_weight_init_queues", "_instruction_queues", "_ack_queues"):
        for queue in getattr(scheme, name, {}).values():
            queue.cancel_join_thread()  # of workers that have died nobody reads what is still to be sent
    scheme.shutdown()


def is_alive(process: Any) -> bool:
    """Whether a worker runs, also where TorchRL has closed its handle."""
    try:
        return process.is_alive()
    except ValueError:  # closed
        return False


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM for the processes that are started, and let this one hear of them at the end."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    caught: list[int] = []

    def keep(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    handlers: dict[int, Any] = {}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        # The mask is this thread's: another one may still be handed a signal, which Python handles in the main thread.
        if threading.current_thread() is threading.main_thread():
            handlers = {n: signal.signal(n, keep) for n in _SIGNALS if callable(signal.getsignal(n))}
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(caught):
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_names(before: set[Any]) -> None:
    """Remove the names of semaphores that were made since: they serve to open them, and all have."""
    registry = util._finalizer_registry  # type: ignore[attr-defined]
    for key in [key for key in registry if key not in before]:
        finalizer = registry.get(key)
        if finalizer is not None and finalizer._callback is SemLock._cleanup:
            finalizer()
