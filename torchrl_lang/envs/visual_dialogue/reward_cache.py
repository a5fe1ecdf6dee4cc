"""The reward caches of a dialogue file: for each dialogue the initial value and what each of its rounds earned."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang._files import FileError, write_file
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels
from torchrl_lang.envs.visual_dialogue.files import SplitFiles
from torchrl_lang.envs.visual_dialogue.steps import Measure, measured

__all__ = ["RewardCaches", "compute_reward_caches", "unfinished_rewards", "write_reward_caches"]

_MEASURES: tuple[Measure, Measure] = ("distance", "rank")
_TOLERANCE = 1e-4
"""Relative to the largest number of a row."""


@runtime_checkable
class _ScoresRounds(Protocol):
    """Models that score all rounds of a dialogue in one pass."""

    def by_round(self, dialogues: Sequence[Dialogue], features: Tensor) -> list[tuple[list[float], list[float]]]: ...


class RewardCaches(NamedTuple):
    """A list a dialogue of each: the initial value, then the reward of each round (11 numbers for ten rounds).

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.envs.visual_dialogue import RewardCaches
        >>> with tempfile.TemporaryDirectory() as home:
        ...     RewardCaches([[2.0, 0.5]], [[0.25, 0.5]]).save(home, "val")
        ...     sorted(path.name for path in pathlib.Path(home).iterdir())
        ['val_rank_reward_cache1.json', 'val_reward_cache2.json']
    """

    distance: list[list[float]]
    rank: list[list[float]]

    def save(self, folder: str | Path, split: str) -> None:
        """Write both under the names that the ILQL paper's data has."""
        files = SplitFiles.in_folder(folder, split)
        write_file(files.distance_rewards, json.dumps(self.distance))
        write_file(files.rank_rewards, json.dumps(self.rank))


def compute_reward_caches(
    models: DialogueModels,
    dialogues: Sequence[Dialogue],
    features: Callable[[Sequence[int]], Tensor],
    *,
    partial: str | Path | None = None,
    batch_size: int = 16,
    on_batch: Callable[[int], object] = lambda done: None,
) -> RewardCaches:
    """Both reward caches of complete dialogues.

    After each batch the results are appended to the file ``partial``. A call that finds it continues after the last
    complete dialogue, with the same result. It computes the first dialogue again, to notice other models or features.

    Args:
        models: that guess, in process or behind HTTP.
        dialogues: with all of their rounds.
        features: returns the image features of dialogues by their numbers, float ``[N, F]``.
        partial: file to continue from; the caller deletes it once the caches have been saved.
        batch_size: dialogues at a time.
        on_batch: called with the number of dialogues that are done.

    Raises:
        FileError: ``partial`` is about other dialogues, models or features.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, Round, compute_reward_caches
        >>> class Models:
        ...     def distances(self, dialogues, features):
        ...         return torch.tensor([2.0 - 0.5 * len(dialogue.rounds) for dialogue in dialogues])
        ...     def percentiles(self, dialogues, features):
        ...         return torch.tensor([0.5 + 0.25 * len(dialogue.rounds) for dialogue in dialogues])
        >>> dialogues = [Dialogue("a cat", (Round("is it black?", "no"),))]
        >>> compute_reward_caches(Models(), dialogues, lambda rows: torch.ones(len(rows), 2))
        RewardCaches(distance=[[2.0, 0.5]], rank=[[0.5, 0.25]])
    """
    at_least_one("batch_size", batch_size)
    journal = None if partial is None else _Journal(Path(partial), dialogues)
    done = [] if journal is None else journal.read()
    if done:
        assert journal is not None
        journal.check(done[0], _rows(models, dialogues[:1], features([0]))[0])
    for first in range(len(done), len(dialogues), batch_size):
        last = min(first + batch_size, len(dialogues))
        rows = _rows(models, dialogues[first:last], features(range(first, last)))
        if journal is not None:
            journal.append(rows)
        done += rows
        on_batch(last)
    return RewardCaches([row[0] for row in done], [row[1] for row in done])


def unfinished_rewards(folder: str | Path, split: str) -> Path:
    """Where :func:`write_reward_caches` keeps what it has computed, until all of it is there."""
    return Path(folder) / f"{split}_rewards.partial"


def write_reward_caches(
    models: DialogueModels,
    dialogues: Sequence[Dialogue],
    features: Callable[[Sequence[int]], Tensor],
    folder: str | Path,
    split: str,
    *,
    batch_size: int = 16,
    on_batch: Callable[[int], object] = lambda done: None,
) -> None:
    """Compute the caches of a split and write them to a folder; an interrupted call continues.

    Args:
        models: see :func:`compute_reward_caches`, also for those that follow.
        dialogues: with all of their rounds.
        features: of dialogues by their numbers.
        folder: of the caches. One process at a time writes those of a split: hold a lock.
        split: in the names of the files, see :class:`SplitFiles`.
        batch_size: dialogues at a time.
        on_batch: called with the number of dialogues that are done.

    Raises:
        FileError: the folder has an unfinished computation with other dialogues, models or features.
    """
    partial = unfinished_rewards(folder, split)
    options: dict[str, Any] = {"partial": partial, "batch_size": batch_size, "on_batch": on_batch}
    compute_reward_caches(models, dialogues, features, **options).save(folder, split)
    partial.unlink()


def _rows(
    models: DialogueModels, dialogues: Sequence[Dialogue], features: Tensor
) -> list[tuple[list[float], list[float]]]:
    """Of each dialogue, its row of both caches."""
    if isinstance(models, _ScoresRounds):
        return [(_changes(far, -1), _changes(rank, 1)) for far, rank in models.by_round(dialogues, features)]
    prefixes = [[each.first(count) for count in range(len(each.rounds) + 1)] for each in dialogues]
    owners = [owner for owner, of_one in enumerate(prefixes) for _ in of_one]
    flat = [prefix for of_one in prefixes for prefix in of_one]
    down, up = (iter(measured(models, flat, features[owners], measure)) for measure in _MEASURES)
    return [
        (_changes([next(down) for _ in of_one], -1), _changes([next(up) for _ in of_one], 1)) for of_one in prefixes
    ]


def _changes(values: list[float], sign: int) -> list[float]:
    return values[:1] + [sign * (after - before) for before, after in itertools.pairwise(values)]


class _Journal:
    """A file with a line that identifies the dialogues, and one line for each that is done."""

    def __init__(self, path: Path, dialogues: Sequence[Dialogue]) -> None:
        self.path, self.rounds = path, [len(dialogue.rounds) for dialogue in dialogues]
        self.head = {"dialogues": hashlib.sha256(json.dumps(list(dialogues)).encode()).hexdigest()}

    def read(self) -> list[tuple[list[float], list[float]]]:
        """The rows so far; a line that was not written to its end is removed."""
        if not self.path.exists():
            write_file(self.path, json.dumps(self.head) + "\n")
        content = self.path.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        try:
            head, *rows = [json.loads(line) for line in complete.splitlines()]
            fits = head == self.head and all(map(_fits, rows, self.rounds)) and len(rows) <= len(self.rounds)
        except ValueError as error:
            raise self._error("is damaged") from error
        if not fits:
            raise self._error("is about other dialogues")
        if complete != content:
            os.truncate(self.path, len(complete))
        return [(distance, rank) for distance, rank in rows]

    def append(self, rows: Sequence[tuple[list[float], list[float]]]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())

    def check(self, before: tuple[list[float], list[float]], now: tuple[list[float], list[float]]) -> None:
        for old, new in zip(before, now, strict=True):
            margin = _TOLERANCE * max(map(abs, old))
            if all(abs(one - other) <= margin for one, other in zip(old, new, strict=True)):
                continue
            raise self._error("was computed with other models or features")

    def _error(self, found: str) -> FileError:
        return FileError(self.path, found, "delete it to begin again, or give the dialogues and models of before")


def _fits(row: Any, rounds: int) -> bool:
    """Whether a line of the file has both rows of numbers."""
    if not isinstance(row, list) or len(row) != len(_MEASURES):
        return False
    return all(
        isinstance(values, list) and len(values) == rounds + 1 and all(isinstance(value, float) for value in values)
        for values in row
    )
