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
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchrl_lang._checks import Count, Positive, checked, needs_extra
from torchrl_lang._files import FileError

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
        options: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        options |= {"cwd": folder, "env": {**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}}
        options["start_new_session"] = True  # the terminal's Ctrl-C does not reach it, and its compilers end with it
        with theirs:
            # -P: the script's folder is not added to sys.path.
            command = [sys.executable, "-P", str(_SCRIPT), str(theirs.fileno()), folder, str(os.getpid())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **options)
        self._finalizer = weakref.finalize(self, _end, self.process, self.connection, folder, os.getpid())
        self._ready = False
        self._send({"infos": list(infos), "expert": expert})

    def ask(self, jobs: Sequence[Mapping[str, Any]], *, singly: bool = False) -> None:
        """Send jobs; :meth:`answers` returns their answers (``singly`` one by one). A dead process raises there."""
        self._send({"jobs": list(jobs), "singly": singly})

    def answers(self, limit: float) -> list[Answer]:
        """Wait for the next answers, one or more.

        Raises:
            TimeoutError: there is none after ``limit`` seconds.
            EOFError, OSError: the process is dead.
        """
        if not self._ready:
            (loaded,) = self._receive(_START_LIMIT)
            if "error" in loaded:
                raise RuntimeError(f"The engine could not be loaded:\n{loaded['error']}")
            self._ready = True
        return self._receive(limit)

    def end(self) -> None:
        """Kill the process and its children, and remove its folder. Further calls do nothing."""
        self._finalizer()

    def _send(self, message: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(json.dumps(message).encode())

    def _receive(self, limit: float) -> list[Answer]:
        if not self.connection.poll(limit):
            raise TimeoutError
        return json.loads(self.connection.recv_bytes())


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

    @checked
    def __init__(self, workers: Count, infos: Sequence[str] = (), *, expert: bool = False, time_limit: Positive = 10.0):
        self.workers, self.infos, self.expert, self.time_limit = workers, tuple(infos), expert, time_limit
        self._played: dict[int, tuple[str, list[str]]] = {}
        """The file and the commands of the game in each row."""
        self._processes: dict[int, EngineProcess] = {}
        self._owner = os.getpid()

    def begin(self, paths: Mapping[int, str]) -> dict[int, Answer]:
        """Begin the game of a file in each of the rows."""
        self._played |= {row: (path, []) for row, path in paths.items()}
        for process in self._processes.values():
            process.held -= paths.keys()
        answers: dict[int, Any] = self._play({row: {"row": row} for row in paths})
        for row, answer in answers.items():
            if isinstance(answer, Failed):
                raise FileError(paths[row], f"cannot be begun by the engine ({answer})", REMEDY)
        return answers

    def step(self, commands: Mapping[int, str]) -> dict[int, Answer | Failed]:
        """Play one command in the game of each of the rows; processes work in parallel."""
        answers = self._play({row: {"row": row, "command": text} for row, text in commands.items()})
        for row, answer in answers.items():
            if not isinstance(answer, Failed):
                self._played[row][1].append(commands[row])
        return answers

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        for process in self._processes.values():
            process.end()
        self._processes = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processes": {}}

    # -- communication with processes ----------------------------------------------------------------------------------

    def _play(self, jobs: Mapping[int, Answer]) -> dict[int, Answer | Failed]:
        if self._owner != os.getpid():  # after a fork the processes belong to the parent
            self._processes, self._owner = {}, os.getpid()
        waiting: dict[int, deque[Answer]] = defaultdict(deque)
        for row, job in jobs.items():
            waiting[row % self.workers].append(job)
        answers: dict[int, Answer | Failed] = {}
        try:
            for number in waiting.keys() - self._processes.keys():
                # start all of them before waiting for the first
                self._processes[number] = EngineProcess(self.infos, expert=self.expert)
            for number, queue in waiting.items():
                self._send(number, queue, singly=False)
            for number, queue in waiting.items():
                self._receive(number, queue, answers)
        except BaseException:
            self.close()  # pending answers would be read as answers to later jobs
            raise
        return answers

    def _send(self, number: int, queue: deque[Answer], *, singly: bool) -> None:
        """Send a process all its jobs, with all that was played in games that it does not have."""
        process = self._processes[number]
        for job in queue:
            if job["row"] not in process.held:
                job["path"], job["history"] = self._played[job["row"]]
        process.ask(queue, singly=singly)

    def _receive(self, number: int, queue: deque[Answer], answers: dict[int, Answer | Failed]) -> None:
        """Add the answers of a process to its jobs; if it fails, another one answers the rest."""
        failed_before = False
        while queue:
            process, replayed = self._processes[number], max(len(job.get("history", ())) for job in queue)
            try:
                for answer in process.answers(self.time_limit + _REPLAY_LIMIT * replayed):
                    job = queue.popleft()
                    process.held.add(job["row"])
                    answers[job["row"]] = self._without_error(job, answer)
                continue
            except (EOFError, OSError) as error:
                slow = isinstance(error, TimeoutError)
                why = f"did not answer for {self.time_limit:g} s" if slow else "has died"
            process.end()
            pid = process.process.pid  # makes each warning different, so that all are shown
            warnings.warn(f"Process {pid} of the TextWorld engine {why}: a new process replaces it.", stacklevel=2)
            if failed_before:  # the first waiting command is the one that failed, for the second time
                advice = ", a busy machine needs a larger time_limit" * slow
                answers[queue.popleft()["row"]] = Failed(f"its process {why}{advice}")
            failed_before = True
            self._processes[number] = EngineProcess(self.infos, expert=self.expert)
            self._send(number, queue, singly=True)

    def _without_error(self, job: Answer, answer: Answer) -> Answer:
        if "error" in answer:
            reason = answer["error"].strip().rsplit("\n", 1)[-1]
            found = f"cannot be {'played on' if 'command' in job else 'begun'} by the engine ({reason})"
            raise FileError(self._played[job["row"]][0], found, REMEDY) from RuntimeError(answer["error"])
        return answer
