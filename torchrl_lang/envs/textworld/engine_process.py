"""The process in which the engine builds and plays games: a script of its own, with nothing of this package in it.

It is started by its path, so that it loads the engine and neither torch nor this library. What it is asked comes over a
pipe as JSON, a list of jobs at a time; the answers go back in order, in lists of one or more. It ends with the pipe, or
when the process that started it is gone.
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

__all__ = ["main"]

_PAUSE = 0.01
"""Seconds between two lists of answers: whoever reads them wants to be woken up seldom."""
_OPEN_GAMES = 256
"""Games that stay loaded, to be begun again without loading them."""


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
        return  # whoever asked is gone
    except Exception:
        connection.send_bytes(json.dumps([{"error": traceback.format_exc()}]).encode())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(host: _Host, connection: Connection, jobs: list[dict[str, Any]], singly: bool) -> None:
    """Answer jobs; ``singly`` each at once, so that it shows at which of them this process fails."""
    answers, since = [], time.monotonic()
    for job in jobs:
        answers.append(host.answer(job))
        if singly or time.monotonic() - since > _PAUSE:
            connection.send_bytes(json.dumps(answers).encode())
            answers, since = [], time.monotonic()
    if answers:
        connection.send_bytes(json.dumps(answers).encode())


def _leave_with(parent: int, folder: str) -> None:
    """End, even in the midst of a hang, when the parent is gone; and the compilers with it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


class _Host:
    """The games of this process, one for each row that is played here."""

    def __init__(self, infos: list[str], expert: bool) -> None:
        import textworld

        names = [*infos, "feedback", "won", "lost", "score", "moves", *(["policy_commands"] if expert else [])]
        asked = textworld.EnvInfos(**dict.fromkeys(names, True), extras=["walkthrough"] if expert else [])
        self._open: Callable[[str], Any] = lambda path: textworld.start(path, asked)
        self._infos, self._expert = infos, expert
        self._rows: dict[int, _Game] = {}
        self._idle: dict[str, list[Any]] = {}

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What one job gives, or the error that it ended in."""
        try:
            if job["do"] == "build":
                return _build(job)
            game = self._begin(job["row"], job["path"]) if "path" in job else self._rows[job["row"]]
            for command in job.get("told", ()):
                game.tell(command)
            if job["do"] == "tell":
                game.tell(job["command"])
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
    """One game in play."""

    def __init__(self, path: str, env: Any) -> None:
        self.path, self.env = path, env
        self.state, self.done = env.reset(), False
        self.acted: bool | None = None
        """Whether the last command did anything; none before the first."""
        self.upto = 0
        """How many commands of the walkthrough have been played."""

    def tell(self, command: str) -> None:
        walkthrough, moves = self.state.get("extra.walkthrough") or [], self.state.get("moves")
        self.state, _, self.done = self.env.step(command)
        self.acted = self.state.get("moves") != moves
        self.upto += walkthrough[self.upto : self.upto + 1] == [command]

    def expert(self) -> str:
        """The engine's plan from here where it has one, else the next command of the game's walkthrough."""
        plan = self.state.get("policy_commands") or (self.state.get("extra.walkthrough") or [])[self.upto :]
        return plan[0] if plan else "look"


# -- building ----------------------------------------------------------------------------------------------------------


def _build(job: Mapping[str, Any]) -> dict[str, Any]:
    """Build a game at ``path`` unless it stands there: one process at a time, and all of it or nothing."""
    import fcntl
    import tempfile

    path = Path(job["path"])
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # falls with this process, however it ends
        if path.exists():
            return {"built": False}
        prefix = f".building-{path.stem}-"
        for left in path.parent.glob(f"{prefix}*"):  # by one that was killed: else the lock were its
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as folder:
            made = Path(folder) / path.name
            _compile(job["kind"], job["seed"], dict(job["options"]), made)
            os.replace(made.with_suffix(".json"), path.with_suffix(".json"))
            os.replace(made, path)  # the game itself comes last: where it stands, all of it stands
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
