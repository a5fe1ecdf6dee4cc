"""Run attacks in forked copies of this process: a hang or a crash ends only the copy, and imports are paid once."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import tqdm

# A forked process has one thread: of a pool of threads it would wait for ever, and for a lock that another one held.
torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0

MEMORY = 8 << 30
"""Bytes that an attacked process may allocate."""


@contextmanager
def captured(answers: str = "") -> Iterator[SimpleNamespace]:
    """Replace the process's three standard streams, also for code that is not Python.

    Args:
        answers: what can be read from standard input.

    Yields:
        ``out`` and ``err``, complete after the block.
    """
    streams = SimpleNamespace(out="", err="")
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(answers.encode())
        stdin.seek(0)
        kept = [os.dup(descriptor) for descriptor in range(3)]
        for descriptor, file in enumerate((stdin, out, err)):
            os.dup2(file.fileno(), descriptor)
        try:
            yield streams
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, copy in enumerate(kept):
                os.dup2(copy, descriptor)
                os.close(copy)
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                setattr(streams, name, file.read().decode(errors="replace"))


class Died(Exception):
    """A forked process did not answer: it hung, crashed, or the attack itself has an error."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict, self.detail = verdict, detail


def run_forked(tasks: Sequence[Callable[[], Any]], *, timeout: float) -> Iterator[Any]:
    """Results of all tasks in order, each of a process of its own, or :class:`Died` in place of one.

    Args:
        tasks: each returns something that JSON can hold.
        timeout: seconds for each.
    """
    for task in tasks:
        with tempfile.TemporaryFile() as file:
            status = _end_of_fork(task, file, timeout)
            file.seek(0)
            answer = file.read()
        if status is None:
            yield Died("hang", f"no answer within {timeout:g} seconds")
        elif not answer:
            ending = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
            yield Died("crash", f"the process ended with {ending}")
        else:
            kind, content = json.loads(answer)
            yield content if kind == "result" else Died("error in the campaign", content)


def _end_of_fork(task: Callable[[], Any], file: Any, timeout: float) -> int | None:
    """The exit code of a fork that writes its answer into a file; None where it had to be stopped."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        try:
            try:
                answer = ["result", task()]
            except Exception:
                answer = ["error", traceback.format_exc()]
            os.write(file.fileno(), json.dumps(answer).encode())
        finally:
            os._exit(0)
    until, wait = time.monotonic() + timeout, 0.001
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(wait := min(2 * wait, 0.05))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None
