"""The script of the processes in which the engine builds and plays games. It imports nothing of this package.

It is started by its path, so that it loads neither torch nor this library. It reads jobs from a pipe, as JSON lists,
and writes the answers in order, in lists of one or more. It ends when the pipe closes or its parent process is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PAUSE = 0.01
"""Seconds between two lists of answers: long, so that the reader wakes up rarely."""
_OPEN_GAMES = 256
"""Number of games that stay loaded, so that they can begin again quickly."""


def main() -> None:
    """Serve until the pipe closes. Arguments: the pipe's file descriptor, its own folder, its parent's id."""
    connection, folder, parent = Connection(int(sys.argv[1])), sys.argv[2], int(sys.argv[3])
    threading.Thread(target=_leave_with, args=(parent, folder), daemon=True).start()
    try:
        host = _Host(**json.loads(connection.recv_bytes()))
        connection.send_bytes(b'[{"ready": true}]')
        while True:
            _serve(host, connection, **json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        return  # the parent process is gone
    except Exception:
        connection.send_bytes(json.dumps([{"error": traceback.format_exc()}]).encode())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(host: _Host, connection: Connection, jobs: list[dict[str, Any]], singly: bool) -> None:
    """Answer jobs; with ``singly`` each at once, so that the parent sees at which one this process fails."""
    answers, since = [], time.monotonic()
    for job in jobs:
        answers.append(host.answer(job))
        if singly or time.monotonic() - since > _PAUSE:
            connection.send_bytes(json.dumps(answers).encode())
            answers, since = [], time.monotonic()
    if answers:
        connection.send_bytes(json.dumps(answers).encode())


def _leave_with(parent: int, folder: str) -> None:
    """Exit, with the compilers, when the parent is gone, even if the engine hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


class _Host:
    """The games of this process, one per row."""

    def __init__(self, infos: list[str], expert: bool) -> None:
        import textworld

        names = [*infos, "feedback", "won", "lost", "score", "moves", *(["policy_commands"] if expert else [])]
        asked = textworld.EnvInfos(**dict.fromkeys(names, True), extras=["walkthrough"] if expert else [])
        self._open: Callable[[str], Any] = lambda path: textworld.start(path, asked)
        self._infos, self._expert = infos, expert
        self._rows: dict[int, _Game] = {}
        self._idle: dict[str, list[Any]] = {}

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a job, or the error that it raised."""
        try:
            if "kind" in job:
                return _build(job)
            game = self._begin(job["row"], job["path"]) if "path" in job else self._rows[job["row"]]
            for command in [*job.get("history", ()), *([job["command"]] if "command" in job else [])]:
                game.step(command)
            return self._state(game)
        except Exception:
            return {"error": traceback.format_exc()}

    def _begin(self, row: int, path: str) -> _Game:
        if row in self._rows:
            before = self._rows.pop(row)
            self._idle.setdefault(before.path, []).append(before.env)
        idle = self._idle.get(path)
        env = idle.pop() if idle else self._open(path)
        while sum(map(len, self._idle.values())) > _OPEN_GAMES:
            oldest = next(path for path, envs in self._idle.items() if envs)
            self._idle[oldest].pop().close()
        self._rows[row] = game = _Game(path, env)
        return game

    def _state(self, game: _Game) -> dict[str, Any]:
        state = {key: game.state.get(key) for key in ("feedback", "score", *self._infos)}
        state |= {"won": bool(game.state.get("won")), "lost": bool(game.state.get("lost"))}
        state |= {"done": game.done, "acted": game.acted}
        return state | ({"expert": game.expert()} if self._expert else {})


class _Game:
    """A game that is being played."""

    def __init__(self, path: str, env: Any) -> None:
        self.path, self.env = path, env
        self.state, self.done = env.reset(), False
        self.acted: bool | None = None
        """Whether the last command did anything; None before the first command."""
        self.upto = 0
        """Number of commands of the walkthrough that have been played."""

    def step(self, command: str) -> None:
        walkthrough, moves = self.state.get("extra.walkthrough") or [], self.state.get("moves")
        self.state, _, self.done = self.env.step(command)
        self.acted = self.state.get("moves") != moves
        self.upto += walkthrough[self.upto : self.upto + 1] == [command]

    def expert(self) -> str:
        """The first command of the engine's plan if it has one, otherwise the next command of the walkthrough."""
        plan = self.state.get("policy_commands") or (self.state.get("extra.walkthrough") or [])[self.upto :]
        return plan[0] if plan else "look"


# -- building ----------------------------------------------------------------------------------------------------------


def _build(job: Mapping[str, Any]) -> dict[str, Any]:
    """Build a game at ``path`` unless it exists, atomically and in one process at a time."""
    import fcntl
    import tempfile

    path = Path(job["path"])
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when this process ends
        if path.exists():
            return {"built": False}
        prefix = f".building-{path.stem}-"
        for left in path.parent.glob(f"{prefix}*"):  # of a killed process, because this one holds the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as folder:
            made = Path(folder) / path.name
            _compile(job["kind"], job["seed"], dict(job["options"]), made)
            os.replace(made.with_suffix(".json"), path.with_suffix(".json"))
            os.replace(made, path)  # the game comes last: if it exists, all its files exist
    return {"built": True}


def _compile(kind: str, seed: int, settings: dict[str, Any], path: Path) -> None:
    import textworld
    from textworld.challenges import CHALLENGES
    from textworld.generator import compile_game

    options = textworld.GameOptions()
    options.seeds = seed
    options.path = str(path)
    if kind == "custom":
        options.nb_rooms, options.nb_objects = settings["world_size"], settings["nb_objects"]
        options.chaining.min_length = options.chaining.max_length = settings["quest_length"]
        options.chaining.max_depth = settings["quest_length"]
        game = textworld.generator.make_game(options)
    else:
        _, make, _ = CHALLENGES[f"tw-{kind}"]
        game = make(settings, options)
    compile_game(game, options)


if __name__ == "__main__":
    main()
