"""Run commands of this package in parallel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from threading import Event, Thread
from typing import IO

__all__ = ["run_in_parallel"]


def run_in_parallel(commands: Mapping[str, Sequence[str]]) -> None:
    """Run commands of this package, as many at a time as there are cores, and print their output.

    Each has one thread: small models gain little from a second one. When one fails, all are stopped.

    Raises:
        ValueError: a command failed; its message has been printed.
    """
    waiting, running = dict(commands), dict[str, subprocess.Popen[str]]()
    readers: list[Thread] = []
    stopped = Event()
    try:
        while (waiting or _unfinished(running)) and not _failed(running):
            while waiting and len(_unfinished(running)) < (os.cpu_count() or 1):
                name = next(iter(waiting))
                running[name] = _start(waiting.pop(name))
                readers.append(Thread(target=_relay, args=(running[name].stdout, stopped), daemon=True))
                readers[-1].start()
            time.sleep(0.1)
    except KeyboardInterrupt:
        stopped.set()  # the demo prints one message for all
        raise
    finally:
        failed = _failed(running)
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()  # for the checkpoint that it writes
        for reader in readers:
            reader.join()
    if failed:
        raise ValueError(f"training {' and '.join(failed)} failed; its message is above.")


def _start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torchrl_lang", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _unfinished(running: Mapping[str, subprocess.Popen[str]]) -> list[str]:
    return [name for name, process in running.items() if process.poll() is None]


def _failed(running: Mapping[str, subprocess.Popen[str]]) -> list[str]:
    return [name for name, process in running.items() if process.poll() not in (None, 0)]


def _relay(stream: IO[str], stopped: Event) -> None:
    """Print the lines of a stream until its end; none after the commands were stopped."""
    for line in stream:
        if not stopped.is_set():
            print(line, end="", flush=True)
