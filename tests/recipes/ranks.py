"""Commands in several processes that train together, each forked with all that it needs to know of the others."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.processes import Program
from torchrl_lang import _ranks
from torchrl_lang.__main__ import main
from torchrl_lang.recipes.collect import CollectedGames, Games
from torchrl_lang.training.progress import Progress

_stores: list[TCPStore] = []


def start(*commands: list[object], number: int = 2) -> list[Program]:
    """Processes that run the commands one after another, up to the first one that fails.

    A command that begins with ``stop`` and a number is stopped by a signal to the last process in that step, after
    ``kill`` and a number the first process dies in that step. One that begins with ``replay`` and a folder plays the
    games that are recorded there, each process its share, or records its own.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as that of torchrun's agent
    _stores.append(store)
    shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    texts = json.dumps([[str(word) for word in command] for command in commands])
    return [Program("-m", "tests.recipes.ranks", texts, RANK=str(rank), **shared) for rank in range(number)]


def run(*commands: list[object], number: int = 2) -> list[Program]:
    """The same, to the end."""
    programs = start(*commands, number=number)
    try:
        for program in programs:
            program.wait(120)
    finally:
        for program in programs:
            program.kill()
    return programs


def rows_of(folder: Path, *names: str) -> list[list[float]]:
    """Columns of a run's log, for each row that has them."""
    header, *lines = (line.split(",") for line in (folder / "log.csv").read_text().splitlines())
    places = [header.index(name) for name in names]
    return [[float(line[place]) for place in places] for line in lines if all(line[place] for place in places)]


def _run(commands: list[list[str]]) -> int:
    torch.set_num_threads(1)
    with _ranks.joined(torch.device("cpu")) if len(commands) > 1 else nullcontext():  # a command joins by itself
        return next((status for command in commands if (status := _status(command))), 0)


def _status(command: list[str]) -> int:
    if command[0] == "replay":
        return _replayed(Path(command[1]), command[2:])
    if command[0] not in ("stop", "kill"):
        return main(command)
    update, stop = Progress.update, int(command[1])
    place, number = (-1, signal.SIGTERM) if command[0] == "stop" else (0, signal.SIGKILL)

    def stopped(progress: Progress, done: int, figures: Any = None) -> None:
        update(progress, done, figures)
        if done == stop and _ranks.rank() == place % _ranks.size():
            signal.raise_signal(number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "update", stopped)
        return main(command[2:])


def _replayed(folder: Path, command: list[str]) -> int:
    play, number = Games.play, count()

    def recorded(games: Games, **options: Any) -> CollectedGames:
        path = folder / f"{next(number)}.pt"
        if not path.exists():
            torch.save(play(games, **options), path)
        every = torch.load(path, weights_only=False)
        return every._replace(rows=every.rows.chunk(_ranks.size())[_ranks.rank()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Games, "play", recorded)
        return main(command)


if __name__ == "__main__":
    sys.exit(_run(json.loads(sys.argv[1])))
