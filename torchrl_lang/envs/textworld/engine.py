"""Processes of the TextWorld engine: started on demand, used in parallel, ended reliably, replaced when they fail."""

from __future__ import annotations

import importlib.metadata
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

from torchrl_lang._checks import check_options
from torchrl_lang._files import FileError
from torchrl_lang.envs.extras import needs_extra

REMEDY = "delete it and build the game again with build_games(specs)"

Answer = dict[str, Any]
"""The state of a game after a command, or an error of the engine."""

_SCRIPT = Path(__file__).with_name("engine_process.py")
_START_LIMIT = 120.0
"""Seconds until a new process must be ready, long because many processes may load the engine at once."""

_REPLAY_LIMIT = 0.1
"""Additional seconds per replayed command of a game."""


def require_textworld() -> None:
    """Raise ImportError, naming the extra, if the engine is not installed."""
    with needs_extra("A TextWorld game", "textworld"):
        importlib.metadata.version("textworld")  # importing it takes seconds


class Failed(str):
    """The reason why the engine gave no answer, instead of an answer."""


class EngineProcess:
    """One process of the engine, with its own folder for files.

    It ends with :meth:`end`, when this object is collected, when this interpreter exits, and when its parent dies.

    Args:
        infos: infos that the engine returns beside its feedback, by the engine's names.
        expert: whether the engine returns an expert's next command.
    """

    def __init__(self, infos: Sequence[str] = (), *, expert: bool = False) -> None:
        self.held: set[int] = set()
        """Rows whose games in this process are in the state of the last answer."""
        self.connection, theirs = Pipe()
        self.folder = folder = tempfile.mkdtemp(prefix="textworld-")
        with theirs:
            self.process = subprocess.Popen(
                # -P: the script's folder is not added to sys.path.
                [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno()), folder, str(os.getpid())],
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's Ctrl-C does not reach it, and its compilers end with it
            )
        self._finalizer = weakref.finalize(self, _end, self.process, self.connection, folder, os.getpid())
        self._ready = False
        self._send({"infos": list(infos), "expert": expert})

    def ask(self, jobs: Sequence[Mapping[str, Any]], *, singly: bool = False) -> None:
        """Send jobs; :meth:`answers` returns their answers (``singly`` one by one). A dead process raises there."""
        if not self._ready:
            if not self.connection.poll(_START_LIMIT):
                raise TimeoutError(f"A process of the engine was not ready after {_START_LIMIT:.0f} s.")
            with suppress(EOFError, OSError):
                self._ready = "ready" in self.answers()[0]
        self._send({"jobs": list(jobs), "singly": singly})

    def answers(self) -> list[Answer]:
        """Wait for the next answers, one or more. Raises EOFError or OSError if the process is dead."""
        answers = json.loads(self.connection.recv_bytes())
        if "error" in answers[0] and not self._ready:
            raise RuntimeError(f"The engine could not be loaded:\n{answers[0]['error']}")
        return answers

    def end(self) -> None:
        """Kill the process and its children, and remove its folder. Further calls do nothing."""
        self._finalizer()

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(json.dumps(message).encode())


def _end(process: subprocess.Popen[bytes], connection: Connection, folder: str, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:  # a copy of the handle in a fork
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class EnginePool:
    """Games in rows, distributed over processes: row ``r`` is played in process ``r`` modulo their number.

    The engine is deterministic, so its file and commands determine a game. If a process dies or does not answer within
    the time limit, a new one begins its games again and replays their commands; this only causes a warning. If the new
    one fails, too, the answer to the failing command is :class:`Failed`.

    Copies, in this process or another one, have their own processes and replay their games.

    Args:
        workers: number of processes.
        infos, expert: as in :class:`EngineProcess`.
        time_limit: seconds per command.
    """

    def __init__(self, workers: int, infos: Sequence[str] = (), *, expert: bool = False, time_limit: float = 10.0):
        check_options(workers=(workers, 1), time_limit=(time_limit, "(0, inf)"))
        self.workers, self.infos, self.expert, self.time_limit = workers, tuple(infos), expert, time_limit
        self._history: dict[int, tuple[str, list[str]]] = {}
        self._processes: dict[int, EngineProcess] = {}
        self._owner = os.getpid()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running engines."""
        return [process.process.pid for process in self._processes.values()]

    def begin(self, paths: Mapping[int, str]) -> dict[int, Answer | Failed]:
        """Begin the game of a file in each of the rows."""
        for row, path in paths.items():
            self._history[row] = (path, [])
        return self._play({row: {"do": "begin", "row": row} for row in paths})

    def step(self, commands: Mapping[int, str]) -> dict[int, Answer | Failed]:
        """Play one command in the game of each of the rows; processes work in parallel."""
        answers = self._play({row: {"do": "step", "row": row, "command": text} for row, text in commands.items()})
        for row, answer in answers.items():
            if not isinstance(answer, Failed):
                self._history[row][1].append(commands[row])
        return answers

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for process in self._processes.values():
            process.end()
        self._processes = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processes": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._history = {row: (path, list(history)) for row, (path, history) in self._history.items()}
        self._owner = os.getpid()

    # -- communication with processes ----------------------------------------------------------------------------------

    def _play(self, jobs: Mapping[int, Answer]) -> dict[int, Answer | Failed]:
        if self._owner != os.getpid():  # after a fork the processes belong to the parent
            self._processes, self._owner = {}, os.getpid()
        waiting: list[deque[Answer]] = [deque() for _ in range(self.workers)]
        for row, job in jobs.items():
            waiting[row % self.workers].append(job)
        try:
            answers = self._ask_all(waiting)
        except BaseException:
            self.close()  # pending answers would be read as answers to later jobs
            raise
        for row, answer in answers.items():
            if not isinstance(answer, Failed) and "error" in answer:
                self.close()
                what = "begun" if jobs[row]["do"] == "begin" else "played on"
                reason = answer["error"].strip().rsplit("\n", 1)[-1]
                found = f"cannot be {what} by the engine ({reason})"
                raise FileError(self._history[row][0], found, REMEDY) from RuntimeError(answer["error"])
        return answers

    def _ask_all(self, waiting: list[deque[Answer]]) -> dict[int, Answer | Failed]:
        answers: dict[int, Answer | Failed] = {}
        busy = [number for number, queue in enumerate(waiting) if queue]
        for number in busy:
            self._start(number)  # start all of them before waiting for the first
        singly: set[int] = set()
        deadlines = {number: self._send(number, waiting[number]) for number in busy}
        while deadlines:
            connections = {self._processes[number].connection: number for number in deadlines}
            failed = {}
            for ready in wait([*connections], max(0.0, min(deadlines.values()) - time.monotonic())):
                number = connections[ready]  # type: ignore[index]
                try:
                    for answer in self._processes[number].answers():
                        row = waiting[number].popleft()["row"]
                        answers[row] = answer
                        self._processes[number].held.add(row)
                    deadlines[number] = self._deadline(waiting[number])
                except (EOFError, OSError):
                    failed[number] = "has died"
            for number, deadline in deadlines.items():
                if deadline < time.monotonic() and not self._processes[number].connection.poll():
                    failed[number] = f"did not answer for {self.time_limit:g} s"
            for number, why in failed.items():
                if number in singly:  # the first waiting command is the one that failed, for the second time
                    answers[waiting[number].popleft()["row"]] = Failed(f"its process {why}")
                singly.add(number)
                process = self._processes.pop(number)
                pid = process.process.pid  # makes each warning different, so that all are shown
                warnings.warn(f"Process {pid} of the TextWorld engine {why}: a new process replaces it.", stacklevel=2)
                process.end()
                if waiting[number]:
                    self._start(number)
                    deadlines[number] = self._send(number, waiting[number], singly=True)
            deadlines = {number: deadline for number, deadline in deadlines.items() if waiting[number]}
        return answers

    def _start(self, number: int) -> None:
        if number not in self._processes:
            self._processes[number] = EngineProcess(self.infos, expert=self.expert)

    def _send(self, number: int, queue: deque[Answer], *, singly: bool = False) -> float:
        """Send a process all its jobs; returns the deadline of the next answers."""
        process = self._processes[number]
        for job in queue:
            path, history = self._history[job["row"]]
            if job["do"] == "begin":
                job["path"] = path
            elif job["row"] not in process.held:
                job |= {"path": path, "history": history}
        process.ask(queue, singly=singly)
        return self._deadline(queue)

    def _deadline(self, queue: deque[Answer]) -> float:
        again = max((len(job.get("history", ())) for job in queue), default=0)
        return time.monotonic() + self.time_limit + _REPLAY_LIMIT * again
