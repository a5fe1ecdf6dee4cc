"""Processes of the engine: started when needed, asked side by side, ended surely, replaced where they fail."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["EngineError", "EnginePool", "EngineProcess", "Failed", "require_textworld"]

Answer = dict[str, Any]
"""What the engine says of a game after a command, or why it says nothing."""

_SCRIPT = Path(__file__).with_name("engine_process.py")
_START_LIMIT = 120.0
"""Seconds until a new process must be ready: it loads the engine, perhaps beside many others."""

_REPLAY_LIMIT = 0.1
"""Seconds more for each command that a game is told again."""


def require_textworld() -> None:
    """Raise ImportError, naming the extra, where the engine is not installed."""
    if importlib.util.find_spec("textworld") is None:
        raise ImportError("TextWorld games need the engine: pip install 'torchrl-lang[textworld]'.")


class Failed(str):
    """Why the engine gave no answer, in the place of an answer."""


class EngineError(RuntimeError):
    """The engine raised an error of its own in a game.

    Args:
        game: the file of the game.
        trace: the engine's traceback; its last line is the ``reason``.
    """

    def __init__(self, game: str, trace: str) -> None:
        self.game, self.reason = game, trace.strip().rsplit("\n", 1)[-1]
        super().__init__(f"The engine failed in {game}:\n{trace}")


class EngineProcess:
    """One process of the engine, with a folder of its own for whatever it writes.

    It ends with :meth:`end`, when this object is collected, when this interpreter ends, and when its parent dies.

    Args:
        infos: what the engine shall tell of a game beside its feedback, by the engine's names.
        expert: whether it shall tell what an expert would do next.
    """

    def __init__(self, infos: Sequence[str] = (), *, expert: bool = False) -> None:
        self.held: set[int] = set()
        """Rows whose games stand in this process as the last answer told them."""
        self.connection, theirs = Pipe()
        self.folder = folder = tempfile.mkdtemp(prefix="textworld-")
        with theirs:
            self.process = subprocess.Popen(
                # -P: the script's neighbours are no modules of its.
                [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno()), folder, str(os.getpid())],
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C of the terminal; and its compilers end with it
            )
        self._finalizer = weakref.finalize(self, _end, self.process, self.connection, folder, os.getpid())
        self._ready = False
        self._send({"infos": list(infos), "expert": expert})

    def ask(self, jobs: Sequence[Mapping[str, Any]], *, singly: bool = False) -> None:
        """Send jobs; :meth:`answers` gives their answers, ``singly`` one at a time. A dead process shows there."""
        if not self._ready:
            if not self.connection.poll(_START_LIMIT):
                raise TimeoutError(f"A process of the engine was not ready after {_START_LIMIT:.0f} s.")
            with suppress(EOFError, OSError):
                self._ready = "ready" in self.answers()[0]
        self._send({"jobs": list(jobs), "singly": singly})

    def answers(self) -> list[Answer]:
        """The next answers, one or more; waits for them. EOFError or OSError where the process is dead."""
        answers = json.loads(self.connection.recv_bytes())
        if "error" in answers[0] and not self._ready:
            raise RuntimeError(f"The engine could not be loaded:\n{answers[0]['error']}")
        return answers

    def end(self) -> None:
        """Kill the process and what it has started, and remove its folder. Does nothing the second time."""
        self._finalizer()

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(json.dumps(message).encode())


def _end(process: subprocess.Popen[bytes], connection: Connection, folder: str, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:  # a fork's copy of the handle
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class EnginePool:
    """Games in rows, spread over processes: row ``r`` is played in process ``r`` modulo their number.

    The engine is deterministic, so a game is known by its file and the commands that it was told. Where a process dies
    or is silent for longer than the time limit, its games are begun again in a new one and told the same, and a warning
    is all that is seen of it. Where the new one fails too, the command at which it does gets :class:`Failed` for an
    answer.

    Copies, in this process or another one, have processes of their own and bring their games where they stand.

    Args:
        workers: number of processes.
        infos, expert: as in :class:`EngineProcess`.
        time_limit: seconds for one command.
    """

    def __init__(self, workers: int, infos: Sequence[str] = (), *, expert: bool = False, time_limit: float = 10.0):
        if workers < 1:
            raise ValueError(f"Games are played in at least one process, got workers={workers}.")
        if not time_limit > 0:
            raise ValueError(f"time_limit is a positive number of seconds, got {time_limit}.")
        self.workers, self.infos, self.expert, self.time_limit = workers, tuple(infos), expert, time_limit
        self._told: dict[int, tuple[str, list[str]]] = {}
        self._processes: list[EngineProcess | None] = [None] * workers
        self._owner = os.getpid()

    @property
    def pids(self) -> list[int]:
        """Process ids of the engines that run now."""
        return [process.process.pid for process in self._processes if process is not None]

    def begin(self, paths: Mapping[int, str]) -> dict[int, Answer | Failed]:
        """Begin the game of a file in each of some rows."""
        for row, path in paths.items():
            self._told[row] = (path, [])
        return self._play({row: {"do": "begin", "row": row} for row in paths})

    def tell(self, commands: Mapping[int, str]) -> dict[int, Answer | Failed]:
        """Tell the games of some rows a command each; rows in other processes at the same time."""
        answers = self._play({row: {"do": "tell", "row": row, "command": text} for row, text in commands.items()})
        for row, answer in answers.items():
            if not isinstance(answer, Failed):
                self._told[row][1].append(commands[row])
        return answers

    def close(self) -> None:
        """End the processes; what is asked next starts new ones."""
        for process in self._processes:
            if process is not None:
                process.end()
        self._processes = [None] * self.workers

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processes": [None] * self.workers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._told = {row: (path, list(told)) for row, (path, told) in self._told.items()}
        self._owner = os.getpid()

    # -- asking --------------------------------------------------------------------------------------------------------

    def _play(self, jobs: Mapping[int, Answer]) -> dict[int, Answer | Failed]:
        if self._owner != os.getpid():  # forked: the processes are the parent's
            self._processes, self._owner = [None] * self.workers, os.getpid()
        waiting: list[deque[Answer]] = [deque() for _ in range(self.workers)]
        for row, job in jobs.items():
            waiting[row % self.workers].append(job)
        try:
            answers = self._ask_all(waiting)
        except BaseException:
            self.close()  # answers under way would be taken for those to other questions
            raise
        for row, answer in answers.items():
            if not isinstance(answer, Failed) and "error" in answer:
                self.close()
                raise EngineError(self._told[row][0], answer["error"])
        return answers

    def _ask_all(self, waiting: list[deque[Answer]]) -> dict[int, Answer | Failed]:
        answers: dict[int, Answer | Failed] = {}
        busy = [number for number, queue in enumerate(waiting) if queue]
        for number in busy:
            self._start(number)  # all of them, before the first is waited for
        singly: set[int] = set()
        deadlines = {number: self._send(number, waiting[number]) for number in busy}
        while deadlines:
            connections = {self._process(number).connection: number for number in deadlines}
            ready = wait([*connections], max(0.0, min(deadlines.values()) - time.monotonic()))
            failed = {}
            for number in [number for connection, number in connections.items() if connection in ready]:
                try:
                    for answer in self._process(number).answers():
                        row = waiting[number].popleft()["row"]
                        answers[row] = answer
                        self._process(number).held.add(row)
                    deadlines[number] = self._deadline(waiting[number])
                except (EOFError, OSError):
                    failed[number] = "has died"
            for number, deadline in deadlines.items():
                if deadline < time.monotonic() and not self._process(number).connection.poll():
                    failed[number] = f"was silent for {self.time_limit:g} s"
            for number, why in failed.items():
                if number in singly:  # then the next command that waits is the one that it failed at, again
                    answers[waiting[number].popleft()["row"]] = Failed(f"its process {why}")
                singly.add(number)
                deadlines[number] = self._again(number, waiting[number], why)
            deadlines = {number: deadline for number, deadline in deadlines.items() if waiting[number]}
        return answers

    def _start(self, number: int) -> None:
        if self._processes[number] is None:
            self._processes[number] = EngineProcess(self.infos, expert=self.expert)

    def _process(self, number: int) -> EngineProcess:
        process = self._processes[number]
        assert process is not None
        return process

    def _send(self, number: int, queue: deque[Answer], *, singly: bool = False) -> float:
        """Ask a process all its jobs; returns until when the next answers must come."""
        process = self._process(number)
        for job in queue:
            path, told = self._told[job["row"]]
            if job["do"] == "begin":
                job["path"] = path
            elif job["row"] not in process.held:
                job |= {"path": path, "told": told}
        process.ask(queue, singly=singly)
        return self._deadline(queue)

    def _deadline(self, queue: deque[Answer]) -> float:
        again = max((len(job.get("told", ())) for job in queue), default=0)
        return time.monotonic() + self.time_limit + _REPLAY_LIMIT * again

    def _again(self, number: int, queue: deque[Answer], why: str) -> float:
        """Put a new process in the place of one that fails, and ask it what is still to be answered."""
        process = self._process(number)
        pid = process.process.pid  # which makes every warning a new one, to be shown
        warnings.warn(f"Process {pid} of the TextWorld engine {why}: a new one takes its place.", stacklevel=2)
        process.end()
        self._processes[number] = None
        if not queue:
            return time.monotonic()
        self._start(number)
        return self._send(number, queue, singly=True)
