"""Processes of the TextWorld engine that serve one environment after another: starting one takes a second."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torchrl_lang.envs.textworld import engine
from torchrl_lang.envs.textworld.engine import EnginePool, EngineProcess


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
        for process in filter(None, pool._processes):
            if id(pool) in failed:
                process.end()
            elif pool._owner == os.getpid():
                process.held.clear()
                idle[pool._owner, pool.infos, pool.expert].append(process)
        pool._processes = [None] * pool.workers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "EngineProcess", start)
        patch.setattr(EnginePool, "_play", play_and_see)
        patch.setattr(EnginePool, "close", close)
        yield
    for process in [process for waiting in idle.values() for process in waiting]:
        process.end()
