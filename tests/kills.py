"""Kill a piece of work at each of its steps on the disk, to see what it leaves behind."""

from __future__ import annotations

import builtins
import io
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

STEPS = [(os, name) for name in ("mkdir", "rename", "replace", "fsync", "unlink", "rmdir")] + [(io, "open")]
MAX_STEPS = 300


def kills(work: Callable[[], Any], every: int = 1) -> Iterator[int]:
    """Run ``work`` again and again, each time in a process of its own that is killed ``every`` steps later.

    Yields the number of steps that were done, after each kill, and ends when the work came to its end.
    """
    for steps in range(0, MAX_STEPS, every):
        process = os.fork()
        if process == 0:
            _run(work, steps)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code == 0:
            assert steps > 3, "the steps were not counted"
            return
        assert code == -signal.SIGKILL, "the work failed: see its traceback above"
        yield steps
    pytest.fail(f"the work did not end after {MAX_STEPS} steps")


def _run(work: Callable[[], Any], steps: int) -> None:
    left = steps

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*arguments, **options)

        return call

    try:
        for module, name in STEPS:
            setattr(module, name, counted(getattr(module, name)))
        builtins.open = io.open
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
