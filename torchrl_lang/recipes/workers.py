"""Worker processes that end with their parent, not with a signal to its group, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import resource_tracker, util
from multiprocessing.synchronize import SemLock
from typing import Any, TypeVar

import torch
from torchrl.weight_update import SharedMemWeightSyncScheme

__all__ = ["end_scheme", "end_with_parent", "is_alive", "start_workers"]

C = TypeVar("C")
_GIVE_UP = 10.0
"""Seconds that a start which is interrupted may take to notice."""


def start_workers(make: Callable[[], C]) -> C:
    """Make a collector, which starts its worker processes by ``spawn`` and returns when all have loaded what they need.

    - Workers are born with SIGINT and SIGTERM blocked: Ctrl-C reaches the whole group of processes, and a worker that
      dies of it in the midst of a message takes the others along. Their parent ends them.
    - An interrupt or an error meanwhile kills those that have been started.
    - The names of their semaphores are removed from shared memory as soon as all have opened them. What no longer has a
      name ends with the last process that uses it, however all of them end.
    """
    resource_tracker.ensure_running()  # else the first worker would start it, which unblocks the signals
    names = set(util._finalizer_registry)  # type: ignore[attr-defined]
    others = set(multiprocessing.active_children())
    made: Future[tuple[C, int]] = Future()
    # In a thread of its own: processes inherit the signals that it blocks, and this thread still hears of them.
    thread = threading.Thread(target=_make, args=(make, made), daemon=True)
    thread.start()
    try:
        collector, threads = made.result()
    except BaseException:
        _abort(thread, made, others)
        raise
    _forget_names(names)
    torch.set_num_threads(threads)  # TorchRL leaves some cores to the workers; the number is each thread's own
    return collector


def _make(make: Callable[[], C], made: Future[tuple[C, int]]) -> None:
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        made.set_result((make(), torch.get_num_threads()))
    except BaseException as error:
        made.set_exception(error)


def _abort(thread: threading.Thread, made: Future[tuple[Any, int]], others: set[Any]) -> None:
    """Kill the workers that have been started, and those that still will be."""
    until = time.monotonic() + _GIVE_UP
    while thread.is_alive() and time.monotonic() < until:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        thread.join(0.1)
    if made.done() and made.exception() is None:
        made.result()[0].shutdown(timeout=1.0)


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


def _forget_names(before: set[Any]) -> None:
    """Remove the names of semaphores that were made since: they serve to open them, and all have."""
    registry = util._finalizer_registry  # type: ignore[attr-defined]
    for key in [key for key in registry if key not in before]:
        finalizer = registry.get(key)
        if finalizer is not None and finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()
