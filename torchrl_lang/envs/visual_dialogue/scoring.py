"""Caches of the rewards of dialogues, computed by models in process or behind HTTP."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang._files import FileError, write_file
from torchrl_lang.envs.visual_dialogue.data import VisualDialogues
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels, measured
from torchrl_lang.envs.visual_dialogue.files import SplitFiles

_Row = tuple[list[float], list[float]]
"""Distance and percentile, first the initial value, then the reward of each round."""
_ROW = TypeAdapter(_Row, config=ConfigDict(allow_inf_nan=False))
_REMEDY = "delete it to begin again, or give the dialogues and models of before"
_TOLERANCE = 1e-4
"""Relative to the largest number of a row."""


class RewardCaches(NamedTuple):
    """A list a dialogue of each: the initial value, then the reward of each round (11 numbers for ten rounds)."""

    distance: list[list[float]]
    rank: list[list[float]]

    def save(self, folder: str | Path, split: str) -> None:
        """Write both under the names that the ILQL paper's data has."""
        files = SplitFiles.in_folder(folder, split)
        write_file(files.distance_rewards, json.dumps(self.distance))
        write_file(files.rank_rewards, json.dumps(self.rank))


@checked
def compute_reward_caches(
    models: DialogueModels,
    dialogues: Sequence[Dialogue],
    features: Callable[[Sequence[int]], Tensor],
    *,
    partial: str | Path | None = None,
    batch_size: Count = 16,
    on_batch: Callable[[int], object] = lambda done: None,
) -> RewardCaches:
    """Computes both reward caches of complete dialogues.

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
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, compute_reward_caches
        >>> class Models:
        ...     def distances(self, dialogues, features):
        ...         return torch.tensor([2.0 - 0.5 * len(dialogue.rounds) for dialogue in dialogues])
        ...     def percentiles(self, dialogues, features):
        ...         return torch.tensor([0.5 + 0.25 * len(dialogue.rounds) for dialogue in dialogues])
        >>> dialogues = [Dialogue("a cat").then("is it black?", "no")]
        >>> compute_reward_caches(Models(), dialogues, lambda rows: torch.ones(len(rows), 2))
        RewardCaches(distance=[[2.0, 0.5]], rank=[[0.5, 0.25]])
    """
    done = [] if partial is None else _unfinished(Path(partial), dialogues)
    if done and not _alike(done[0], _rows(models, dialogues[:1], features([0]))[0]):
        raise FileError(str(partial), "was computed with other models or features", _REMEDY)
    for first in range(len(done), len(dialogues), batch_size):
        last = min(first + batch_size, len(dialogues))
        rows = _rows(models, dialogues[first:last], features(range(first, last)))
        if partial is not None:
            with open(partial, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())
        done += rows
        on_batch(last)
    return RewardCaches([row[0] for row in done], [row[1] for row in done])


def unfinished_rewards(folder: str | Path, split: str) -> Path:
    """The file in which :func:`write_reward_caches` keeps its results until all are there."""
    return Path(folder) / f"{split}_rewards.partial"


def write_reward_caches(models: DialogueModels, data: VisualDialogues, folder: str | Path, **options: Any) -> None:
    """Compute the caches of a split and write them to a folder; an interrupted call continues.

    One process at a time writes those of a split: hold a lock. ``options`` are those of :func:`compute_reward_caches`.
    """
    split, rows = data.features.split, data.features.rows
    partial = unfinished_rewards(folder, split)
    compute_reward_caches(models, data.dialogues, rows, partial=partial, **options).save(folder, split)
    partial.unlink()


def _rows(models: DialogueModels, dialogues: Sequence[Dialogue], features: Tensor) -> list[_Row]:
    """Of each dialogue, its row of both caches."""
    by_round: Any = getattr(models, "by_round", None)  # of models that score all rounds of a dialogue in one pass
    if by_round is not None:
        return [(_changes(far, -1), _changes(rank, 1)) for far, rank in by_round(dialogues, features)]
    ends = [1 + len(each.rounds) for each in dialogues]
    flat = [each.first(count) for each, end in zip(dialogues, ends, strict=True) for count in range(end)]
    repeated = features[[row for row, end in enumerate(ends) for _ in range(end)]]
    far, rank = (iter(measured(models, flat, repeated, measure)) for measure in ("distance", "rank"))
    return [(_changes(list(islice(far, end)), -1), _changes(list(islice(rank, end)), 1)) for end in ends]


def _changes(values: list[float], sign: int) -> list[float]:
    return values[:1] + [sign * (after - before) for before, after in pairwise(values)]


def _unfinished(path: Path, dialogues: Sequence[Dialogue]) -> list[_Row]:
    """The rows of an unfinished computation; a line that was not written to its end is removed.

    The first line identifies the dialogues, and one line follows for each that is done.
    """
    head = json.dumps({"dialogues": hashlib.sha256(json.dumps(list(dialogues)).encode()).hexdigest()})
    if not path.exists():
        write_file(path, head + "\n")
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    first, *lines = complete.splitlines() or [b""]
    if first != head.encode() or len(lines) > len(dialogues):
        raise FileError(path, "is about other dialogues", _REMEDY)
    try:
        rows = [_ROW.validate_json(line) for line in lines]
    except ValueError as error:
        raise FileError(path, "is damaged", _REMEDY) from error
    if complete != content:
        os.truncate(path, len(complete))
    return rows


def _alike(one: _Row, other: _Row) -> bool:
    """Whether two rows of a dialogue differ by no more than rounding."""
    return all(
        abs(before - now) <= _TOLERANCE * max(map(abs, old))
        for old, new in zip(one, other, strict=True)
        for before, now in zip(old, new, strict=True)
    )
