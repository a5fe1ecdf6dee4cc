"""Run attacks in forked copies of this process: a hang or a crash ends only the copy, and imports are paid once."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import tqdm

# A forked process has one thread: of a pool of threads it would wait for ever, and for a lock that another one held.
torch.set_num_threads(1)
tqdm.tqdm.monitor_interval = 0

MEMORY = 8 << 30
"""Bytes that an attacked process may allocate."""


@dataclass
class Streams:
    """What was printed, complete after the block of :func:`captured`."""

    out: str = ""
    err: str = ""


@contextmanager
def captured(answers: str = "") -> Iterator[Streams]:
    """Replace the process's three standard streams, also for code that is not Python.

    Args:
        answers: what can be read from standard input.
    """
    streams = Streams()
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


def run_forked(tasks: Sequence[Callable[[], Any]], *, timeout: float, batch: int = 25) -> Iterator[Any]:
    """Results of all tasks in order, or :class:`Died` in place of one.

    A forked process runs up to ``batch`` tasks; the next one goes on behind the task that ended it.

    Args:
        tasks: each returns something that JSON can hold.
        timeout: seconds for each.
    """
    position = 0
    while position < len(tasks):
        for result in _run_batch(tasks[position : position + batch], timeout):
            yield result
            position += 1


def _run_batch(tasks: Sequence[Callable[[], Any]], timeout: float) -> Iterator[Any]:
    """Results until the forked process ends."""
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process == 0:
        os.close(read)
        _answer(tasks, write)
    os.close(write)
    lines = _Lines(read)
    try:
        for _ in tasks:
            line = lines.next(timeout)
            if line is None:
                yield Died("hang", f"no answer within {timeout:g} seconds")
                return
            if not line:
                yield Died("crash", f"the process ended with {_ending(process)}")
                return
            kind, content = json.loads(line)
            yield content if kind == "result" else Died("error in the campaign", content)
    finally:
        os.close(read)
        _end(process)


def _answer(tasks: Sequence[Callable[[], Any]], pipe: int) -> None:
    """What the forked process does; never returns."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        for task in tasks:
            try:
                answer = ["result", task()]
            except Exception:
                answer = ["error", traceback.format_exc()]
            os.write(pipe, json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


class _Lines:
    """Reads lines from a pipe, each with a limit of time."""

    def __init__(self, pipe: int) -> None:
        self.pipe, self.waiting = pipe, b""

    def next(self, timeout: float) -> bytes | None:
        """The next line, empty at the end, ``None`` where nothing comes in time."""
        while b"\n" not in self.waiting:
            if not select.select([self.pipe], [], [], timeout)[0]:
                return None
            more = os.read(self.pipe, 65536)
            if not more:
                return b""
            self.waiting += more
        line, self.waiting = self.waiting.split(b"\n", 1)
        return line


def _ending(process: int) -> str:
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    return f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _end(process: int) -> None:
    try:
        if os.waitpid(process, os.WNOHANG)[0] == 0:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    except ChildProcessError:  # its end was seen before
        pass
