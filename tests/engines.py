"""Processes of the TextWorld engine that start at once, or serve one environment after another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import forget_the_parent
from torchrl_lang.envs.textworld import engine, engine_process, games
from torchrl_lang.envs.textworld.engine import EnginePool, EngineProcess

NAME = "engine-fork"
"""The name of forked processes in ``/proc``."""


class Fork(subprocess.Popen):
    """A process that runs the engine's script in a fork, where the engine is imported already."""

    def __init__(self, arguments: list[str], *, pass_fds: list[int], cwd: str, env: dict[str, str], **_: Any) -> None:
        import textworld  # noqa: F401

        self.args, self.returncode, self._waitpid_lock = arguments, None, threading.Lock()
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                os.chdir(cwd)
                os.environ.update(env)
                tempfile.tempdir = None  # it is found in the environment
                Path("/proc/self/comm").write_text(NAME)
                nowhere = os.open(os.devnull, os.O_RDWR)
                for number in range(3):
                    os.dup2(nowhere, number)
                forget_the_parent(pass_fds)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                sys.argv = arguments[2:]
                engine_process.main()
            finally:
                os._exit(0)


@contextmanager
def forked() -> Iterator[None]:
    """Within, processes of the engine are forks of this one: the engine takes seconds to import and to parse rules."""
    begin, build, parsed = EnginePool.begin, games._build, set()

    def parse_and_begin(pool: EnginePool, paths: Mapping[int, str]) -> dict[int, Any]:
        new = set(paths.values()) - parsed
        if new:
            in_a_thread(parse_rules, new)
            parsed.update(new)
        return begin(pool, paths)

    def parse_and_build(*arguments: Any) -> None:
        in_a_thread(parse_grammar)
        build(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "subprocess", SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL))
        patch.setattr(EnginePool, "begin", parse_and_begin)
        patch.setattr(games, "_build", parse_and_build)
        yield


def in_a_thread(parse: Callable[..., None], *arguments: Any) -> None:
    """Parse in a thread, because the engine's parser keeps its errors, and they keep the frames of its callers."""
    thread = threading.Thread(target=parse, args=arguments)
    thread.start()
    thread.join()


def parse_grammar() -> None:
    """Parse the texts that games are written from; the engine remembers them, also in forks.

    Most kinds of games have copies of the same texts, and the engine would parse each of them.
    """
    import textworld
    from textworld.generator.text_grammar import Grammar
    from textworld.textgen import TextGrammar

    root, parsed = Path(textworld.__file__).parent, {}
    for path in sorted((root / "generator/data/text_grammars").glob("house_*.twg")):
        text = path.read_text()
        if str(path) not in Grammar._cache:
            Grammar._cache[str(path)] = TextGrammar.parse(text, filename=str(path))
        parsed[path.name, text] = Grammar._cache[str(path)]
    for path in root.glob("challenges/*/textworld_data/text_grammars/*.twg"):
        if (path.name, text := path.read_text()) in parsed:
            Grammar._cache.setdefault(str(path), parsed[path.name, text])


def parse_rules(files: Iterable[str]) -> None:
    """Parse the rules of games in this process: the engine remembers them, also in forks."""
    from textworld.logic import GameLogic

    for game in files:
        with suppress(OSError, ValueError, LookupError):  # what is wrong with a file, its environment says
            GameLogic.parse(json.loads(Path(game).with_suffix(".json").read_text())["KB"]["logic"])


@contextmanager
def reused() -> Iterator[None]:
    """Within, a pool that is closed leaves its processes to the next pool that asks for the same; at the end they end.

    A pool whose last question ended by an error ends its processes as usual: answers may still be under way.
    """
    idle: dict[tuple[Any, ...], list[EngineProcess]] = defaultdict(list)
    play, failed = EnginePool._play, set()

    def start(infos: Any = (), *, expert: bool = False) -> EngineProcess:
        waiting = idle[os.getpid(), tuple(infos), expert]  # a fork has none
        while waiting:
            if (process := waiting.pop()).process.poll() is None:
                return process
        return EngineProcess(infos, expert=expert)

    def play_and_see(pool: EnginePool, jobs: Any) -> Any:
        failed.add(id(pool))
        answers = play(pool, jobs)
        failed.discard(id(pool))
        return answers

    def close(pool: EnginePool) -> None:
        for process in pool._processes.values():
            if id(pool) in failed:
                process.end()
            elif pool._owner == os.getpid():
                process.held.clear()
                idle[pool._owner, pool.infos, pool.expert].append(process)
        pool._processes = {}

    with forked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "EngineProcess", start)
        patch.setattr(EnginePool, "_play", play_and_see)
        patch.setattr(EnginePool, "close", close)
        yield
    for process in [process for waiting in idle.values() for process in waiting]:
        process.end()
