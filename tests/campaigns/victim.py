"""A command that kills its own process at its n-th write; also a program: ``python -m tests.campaigns.victim``."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch

from tests.campaigns.commands import run_program

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")
"""Audit events that change files beside ``open``."""


@dataclass
class Killer:
    """Counts what the process does to files below a folder, and kills the process before one of these events.

    Args:
        folder: where events count.
        at: the number of the event, counted from 0; ``None`` only counts.
        torn: do half of the event first: a file that is opened for writing is emptied, tensors are half written.
        signal_number: what the process sends itself.
        last_words: a file that gets the names of the shared memory of this process and its children.
    """

    folder: Path
    at: int | None
    torn: bool = False
    signal_number: int = signal.SIGKILL
    last_words: Path | None = None
    events: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Watch from now on, as long as the process lives."""
        sys.addaudithook(self._hook)
        self._wrap(os, "fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
        # Written by compiled code, which no audit hook sees.
        self._wrap(safetensors.torch, "serialize_file", lambda tensors, path, **more: str(path), tear=_halve)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & WRITING and isinstance(arguments[0], (str, bytes)):
            path, flags = os.fsdecode(arguments[0]), arguments[2]
            self._count("open", path, lambda: _begin(path, flags))
        elif event in CHANGES and not isinstance(arguments[0], int):
            self._count(event, os.fsdecode(arguments[0]))

    def _wrap(
        self, module: Any, name: str, path_of: Callable[..., str], tear: Callable[[str], None] | None = None
    ) -> None:
        function = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            path = path_of(*args, **kwargs)

            def half() -> None:
                function(*args, **kwargs)
                if tear is not None:
                    tear(path)

            self._count(name, path, half)
            return function(*args, **kwargs)

        setattr(module, name, wrapped)

    def _count(self, event: str, path: str, half: Callable[[], Any] | None = None) -> None:
        if not os.path.abspath(path).startswith(str(self.folder)):
            return
        number = len(self.events)
        self.events.append(f"{event} {os.path.relpath(path, self.folder)}")
        if number == self.at:
            self.at = None
            if self.torn and half is not None:
                half()
            if self.last_words is not None:
                self.last_words.write_text(json.dumps(sorted(shared_memory(os.getpid()))))
            os.kill(os.getpid(), self.signal_number)


def _begin(path: str, flags: int) -> None:
    """What stands there after half of a write."""
    descriptor = os.open(path, flags & ~os.O_EXCL, 0o644)
    if flags & os.O_APPEND:
        os.write(descriptor, b"9,0.")
    os.close(descriptor)


def _halve(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


def descendants(process: int) -> list[int]:
    """Processes that this one started, and those that they did."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{process}/task").iterdir():
            children = [int(child) for child in (task / "children").read_text().split()]
            found += [other for child in children for other in (child, *descendants(child))]
    except OSError:  # it has ended
        pass
    return found


def shared_memory(process: int) -> set[str]:
    """Files in ``/dev/shm`` that a process or one of its descendants has mapped."""
    found: set[str] = set()
    for one in (process, *descendants(process)):
        try:
            lines = Path(f"/proc/{one}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return found


def main(arguments: list[str]) -> int:
    """``FOLDER AT TORN SIGNAL LAST_WORDS COMMAND...``"""
    folder, at, torn, number, last_words, *command = arguments
    # A shell starts background jobs with SIGINT ignored, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    when = int(at) if int(at) >= 0 else None
    killer = Killer(Path(folder), when, torn=torn == "True", signal_number=int(number), last_words=Path(last_words))
    killer.install()
    try:
        return run_program(command)
    finally:
        Path(last_words).write_text(json.dumps(killer.events))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
