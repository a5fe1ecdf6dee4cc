"""Write a maker's games to disk in parts: by several processes, with progress, and continued after an interruption."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from torchrl_lang._checks import at_least_one
from torchrl_lang._files import Fields, folder_lock, write_json
from torchrl_lang.data.dataset_format import DISK_DTYPES, MANIFEST
from torchrl_lang.data.dataset_writer import DatasetWriter, write_dataset
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.makers.base import GameMaker

__all__ = ["generate_in_parts"]

_PLAN = "plan.json"


class _Part(NamedTuple):
    """Some games of a dataset."""

    folder: Path
    numbers: range


def generate_in_parts(
    maker: GameMaker,
    folder: str | os.PathLike[str],
    *,
    games: int,
    seed: int = 0,
    games_per_part: int = 4096,
    workers: int = 1,
    source: str | None = None,
    notes: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> RowDataset:
    """Make games and write them to disk, ``games_per_part`` at a time.

    Each part is written to a hidden folder beside ``folder`` as soon as it is made. If the call is interrupted or
    killed, the same call continues: it makes only the parts that are missing. In the end the parts are joined to one
    dataset and deleted. The files depend on ``maker``, ``games``, ``games_per_part`` and ``seed`` only, not on
    ``workers`` or interruptions. Calls count as the same if these numbers, ``source`` and all notes agree: a maker's
    options that its notes do not contain are not compared.

    Args:
        maker: makes the games. With several workers it is sent to other processes, started by ``spawn``; a script needs
            ``if __name__ == "__main__":`` then.
        folder: the folder to create.
        games: number of games.
        seed: seed of the games.
        games_per_part: games that are made at once and lost by an interruption, best a multiple of the number of rows
            of the maker's environment.
        workers: number of processes that make games; 1 makes them in this one.
        source: a description for the manifest; default the maker's class.
        notes: further JSON content for the manifest, beside ``maker.notes()``.
        overwrite: replace an existing dataset, and the parts of an interrupted call with other arguments.
        progress: show a progress bar.

    Returns:
        The dataset, opened.

    Raises:
        FileExistsError: ``folder`` exists, or another process is writing it.
        ValueError: a number is out of range, or an interrupted call with other arguments has left parts.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import PolicyGames, generate_in_parts
        >>> from torchrl_lang.envs.games import CorridorEnv, CorridorPlayer
        >>> env = CorridorEnv(length=3, batch_size=[16])
        >>> maker = PolicyGames(env, CorridorPlayer(env.tokenizer, length=3))
        >>> with tempfile.TemporaryDirectory() as home:
        ...     len(generate_in_parts(maker, home + "/data", games=40, games_per_part=16, progress=False))
        40
    """
    for name, number in (("games", games), ("games_per_part", games_per_part), ("workers", workers)):
        at_least_one(name, number)
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists: give another folder, or overwrite=True to replace the dataset.")
    source = type(maker).__name__ if source is None else source
    every = {**maker.notes(), **(notes or {})}
    plan = {"games": games, "games_per_part": games_per_part, "seed": seed, "source": source, "notes": every}
    with folder_lock(folder.with_name(f".{folder.name}.parts"), "generates", shown=folder) as home:
        _check_plan(home, json.loads(json.dumps(plan)), folder, overwrite=overwrite)
        starts = range(0, games, games_per_part)
        parts = [_Part(home / f"{n:06}", range(s, min(s + games_per_part, games))) for n, s in enumerate(starts)]
        missing = [part for part in parts if not (part.folder / MANIFEST).exists()]
        with tqdm(total=games, unit="game", disable=not progress) as bar:
            bar.update(games - sum(len(part.numbers) for part in missing))
            for part in _made(maker, missing, seed, min(workers, len(missing))):
                bar.update(len(part.numbers))
        _join(maker, parts, folder, seed=seed, source=source, notes=every, overwrite=overwrite)
        shutil.rmtree(home)
    return load_dataset(folder, tokenizer=maker.tokenizer, verify=False)


def _check_plan(home: Path, plan: dict[str, Any], folder: Path, *, overwrite: bool) -> None:
    """Delete the parts of another call, or raise."""
    path = home / _PLAN
    if path.exists():
        found = dict(Fields.read(path, remedy=f"delete {home}").content)
        if found == plan:
            return
        other = sorted(key for key in plan if found.get(key) != plan[key])
        if not overwrite:
            raise ValueError(
                f"{home} holds parts of an interrupted call for {folder} with other arguments ({', '.join(other)}): "
                "repeat that call to complete it, delete the parts, or give overwrite=True."
            )
        for left in home.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    write_json(path, plan)


def _made(maker: GameMaker, parts: list[_Part], seed: int, workers: int) -> Iterator[_Part]:
    """Make parts, in any order; yields each when it has been written."""
    if workers < 2:
        for part in parts:
            yield _make(maker, part, seed)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker) as pool:
        futures = [pool.submit(_make, maker, part, seed) for part in parts]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _make(maker: GameMaker, part: _Part, seed: int) -> _Part:
    rows = maker(part.numbers, seed)
    keep = [key for key in rows.keys() if key not in DISK_DTYPES]
    write_dataset(part.folder, rows, maker.tokenizer, keep=keep)
    return part


def _begin_worker() -> None:
    """One thread per process; Ctrl-C is left to the parent; and no process outlives its parent."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _join(
    maker: GameMaker,
    parts: list[_Part],
    folder: Path,
    *,
    seed: int,
    source: str,
    notes: dict[str, Any],
    overwrite: bool,
) -> None:
    """Write all parts as one dataset."""
    keep = [key for key in load_dataset(parts[0].folder, verify=False).rows.keys() if key not in DISK_DTYPES]
    options: dict[str, Any] = {"seed": seed, "source": source, "overwrite": overwrite, "keep": keep}
    with DatasetWriter(folder, maker.tokenizer, maker.row_length, **options) as writer:
        writer.notes = notes
        for part in parts:
            writer.extend(load_dataset(part.folder, tokenizer=maker.tokenizer)[:])
