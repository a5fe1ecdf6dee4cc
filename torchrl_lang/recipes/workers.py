"""Start and stop the worker processes of a collector: signals, dead parents, and shared memory."""

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
"""Seconds to wait for an interrupted start to end."""


def start_workers(make: Callable[[], C]) -> C:
    """Make a collector, which starts its worker processes by ``spawn`` and returns when all of them are ready.

    - Workers start with SIGINT and SIGTERM blocked: Ctrl-C reaches all processes of the group, and a worker that dies
      while it sends a message blocks the others. The parent process ends them instead.
    - An interrupt or an error during the start kills the workers started so far.
    - The names of their semaphores are removed from shared memory once all workers have opened them, so the memory is
      freed with the last process that uses it, however the processes end.
    """
    resource_tracker.ensure_running()  # otherwise the first worker starts it, which unblocks the signals
    names = set(util._finalizer_registry)  # type: ignore[attr-defined]
    others = set(multiprocessing.active_children())
    made: Future[tuple[C, int]] = Future()
    # In a separate thread, because workers inherit its blocked signals; this thread still receives them.
    thread = threading.Thread(target=_make, args=(make, made), daemon=True)
    thread.start()
    try:
        collector, threads = made.result()
    except BaseException:
        _abort(thread, made, others)
        raise
    _forget_names(names)
    torch.set_num_threads(threads)  # TorchRL reserves cores for the workers; the setting is per thread
    return collector


def _make(make: Callable[[], C], made: Future[tuple[C, int]]) -> None:
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        made.set_result((make(), torch.get_num_threads()))
    except BaseException as error:
        made.set_exception(error)


def _abort(thread: threading.Thread, made: Future[tuple[Any, int]], others: set[Any]) -> None:
    """Kill the workers that have been started, and those started until the thread ends."""
    until = time.monotonic() + _GIVE_UP
    while thread.is_alive() and time.monotonic() < until:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        thread.join(0.1)
    if made.done() and made.exception() is None:
        made.result()[0].shutdown(timeout=1.0)


def end_with_parent(parent: int) -> None:
    """End this process, even if it hangs, soon after its parent has ended. (Workers' ``init_fn``.)"""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_scheme(scheme: SharedMemWeightSyncScheme) -> None:
    """Shut down a scheme that TorchRL 0.14's collectors leave open; otherwise the interpreter never exits."""
    for name in ("_weight_init_queues", "_instruction_queues", "_ack_queues"):
        for queue in getattr(scheme, name, {}).values():
            queue.cancel_join_thread()  # messages to dead workers are never read
    scheme.shutdown()


def is_alive(process: Any) -> bool:
    """Whether a worker runs; not if TorchRL has closed its handle."""
    try:
        return process.is_alive()
    except ValueError:  # closed
        return False


def _forget_names(before: set[Any]) -> None:
    """Remove the names of semaphores made since ``before``; all workers have opened them."""
    registry = util._finalizer_registry  # type: ignore[attr-defined]
    for key in [key for key in registry if key not in before]:
        finalizer = registry.get(key)
        if finalizer is not None and finalizer._callback is SemLock._cleanup:  # type: ignore[attr-defined]
            finalizer()
