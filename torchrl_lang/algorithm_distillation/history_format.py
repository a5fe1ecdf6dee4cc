"""The files of a learning history's folder, and the checks of its steps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._files import Fields, FileError, file_in, read_manifest, regular_file, shorten
from torchrl_lang.data.dataset_format import DiskEntry, described_entry, entry_file, further_entry
from torchrl_lang.schema import (
    ACTION,
    ACTION_LOG_PROB,
    DONE,
    EPISODE,
    EPISODE_STEP,
    OBSERVATION,
    REWARD,
    TERMINATED,
    entry,
)

__all__ = [
    "FORMAT",
    "MANIFEST",
    "REMEDY",
    "VERSION",
    "HistoryManifest",
    "Part",
    "check_steps",
    "check_tasks",
    "history_files",
    "part_digests",
    "read_history_manifest",
    "step_entries",
]

FORMAT, VERSION, MANIFEST = "torchrl_lang learning history", 1, "manifest.json"
REMEDY = "the learning history is damaged, record it again"

_REQUIRED = {
    REWARD: DiskEntry(torch.float32, (1,)),
    DONE: DiskEntry(torch.bool, (1,)),
    TERMINATED: DiskEntry(torch.bool, (1,)),
    EPISODE: DiskEntry(torch.int64, ()),
    EPISODE_STEP: DiskEntry(torch.int64, ()),
}
"""The entries of every history with a fixed dtype and shape of a step; it also has an observation and an action."""

_KNOWN = {**_REQUIRED, ACTION_LOG_PROB: DiskEntry(torch.float32, ())}
"""All entries with a fixed dtype and shape."""


class Part(NamedTuple):
    """Steps that were appended together."""

    first: int
    steps: int
    digests: dict[str, str]
    """The SHA-256 of each entry of these steps, ``[tasks, streams, steps, ...]``."""

    @property
    def end(self) -> int:
        """The number of the first step after the part."""
        return self.first + self.steps


class HistoryManifest(NamedTuple):
    """The checked fields of a learning history's manifest."""

    tasks: list[dict[str, Any]]
    source: dict[str, Any]
    shape: torch.Size
    """Tasks, streams and planned steps."""
    entries: dict[str, DiskEntry]
    parts: list[Part]


def step_entries(steps: TensorDictBase) -> dict[str, DiskEntry]:
    """How the entries of steps ``[tasks, streams, L]`` are stored.

    Raises:
        KeyError: an entry that every history has is missing.
        ValueError: an entry has a dtype or a shape that a history cannot store.
    """
    for key in (OBSERVATION, ACTION, *_REQUIRED):
        entry(steps, key)
    found = {}
    for key in sorted(steps.keys()):
        value = steps.get(key)
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ValueError(f"'{key}' of a step is a {kind}, expected a tensor: give its entries names of their own.")
        if 0 in value.shape[3:]:
            shape = list(value.shape[3:])
            raise ValueError(f"'{key}' of a step has shape {shape}, expected sizes of at least 1: leave it out.")
        found[key] = further_entry(key, value.dtype, tuple(value.shape[3:]))
        if found[key] != (known := _KNOWN.get(key, found[key])):
            raise ValueError(
                f"'{key}' of a step is {found[key].dtype} of shape {list(found[key].shape)}, expected {known.dtype} of "
                f"shape {list(known.shape)}."
            )
    return found


def check_tasks(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Check the descriptions of tasks.

    Raises:
        ValueError: there is no task, a description has no number ``"task"``, or two have the same.
    """
    numbers = [task.get("task") for task in tasks]
    if not numbers or not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ValueError(f'Each task of a history is described with its number as "task", got {shorten(list(tasks))}.')
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"The tasks of a history must differ, got the numbers {shorten(numbers)}.")


def check_steps(steps: TensorDictBase, before: TensorDictBase | None, first: int = 0) -> None:
    """Check that steps ``[tasks, streams, L]`` continue those before.

    Args:
        steps: the steps, of which the first one is number ``first``.
        before: the step before, ``[tasks, streams, 1]``; None at the beginning.
        first: the number of the first step.

    Raises:
        ValueError: a step is terminated but not done, or has another ``episode`` or ``episode_step`` than the ``done``
            of the step before requires; or an observation, an action, a reward or a log-probability is not finite.
    """
    keys = (DONE, TERMINATED, EPISODE, EPISODE_STEP)
    done, terminated, episode, step = (steps.get(key).flatten(2) for key in keys)
    _refuse(terminated & ~done, first, "are terminated but not done", "done is terminated or truncated")
    for key in (OBSERVATION, ACTION, REWARD, ACTION_LOG_PROB):
        if (value := steps.get(key, None)) is not None:
            advice = "leave out the entry if it is not known" if key == ACTION_LOG_PROB else "record finite numbers"
            _refuse(~value.isfinite().reshape(*steps.shape, -1).all(-1), first, f"have a non-finite '{key}'", advice)
    if before is None:
        last_episode, last_step, over = (torch.zeros_like(episode[..., :1]) for _ in range(3))
        last_step, over = last_step - 1, over.bool()
    else:
        over, last_episode, last_step = (before.get(key).flatten(2) for key in (DONE, EPISODE, EPISODE_STEP))
    over = torch.cat([over, done[..., :-1]], -1)
    expected = torch.cat([last_episode, episode[..., :-1]], -1) + over
    advice = "count episodes from 0, one more after each done step"
    _refuse(episode != expected, first, f"have another '{EPISODE}' than the steps before require", advice)
    expected = torch.where(over, 0, torch.cat([last_step, step[..., :-1]], -1) + 1)
    advice = "count the steps of each episode from 0"
    _refuse(step != expected, first, f"have another '{EPISODE_STEP}' than the steps before require", advice)


def _refuse(bad: Tensor, first: int, what: str, advice: str) -> None:
    if bad.any():
        task, stream, step = bad.nonzero()[0].tolist()
        where = f"(task {task}, stream {stream}, step {first + step} is the first)"
        raise ValueError(f"{int(bad.sum())} steps {what} {where}: {advice}.")


# -- the manifest and the files ----------------------------------------------------------------------------------------


def read_history_manifest(folder: Path) -> HistoryManifest:
    """Read and check the manifest of a learning history.

    Raises:
        FileNotFoundError: there is no learning history.
        FileError: the manifest is damaged or describes something else.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"There is no learning history in {folder}: {MANIFEST} is missing. Record it first.")
    manifest = read_manifest(path, remedy=REMEDY, version=VERSION, kind=FORMAT)
    source, tasks = manifest.take("source", dict), manifest.list_of("tasks", dict)
    try:
        check_tasks(tasks)
    except ValueError as error:
        raise manifest.error(f"has bad tasks: {shorten(str(error), 160)}") from error
    streams = manifest.at_least("streams", 1)
    entries, parts, end = _entries_of(manifest), _parts_of(manifest), 0
    for part in parts:
        if part.first != end or part.steps < 1 or part.digests.keys() != entries.keys():
            raise manifest.error(f"has a part of {part.steps} steps from step {part.first}, expected one from {end}")
        end = part.end
    steps = manifest.at_least("steps", 1)
    if not 0 < end <= steps:
        raise manifest.error(f'has parts of {end} steps, but {steps} as "steps"')
    return HistoryManifest(tasks, source, torch.Size([len(tasks), streams, steps]), entries, parts)


def _entries_of(manifest: Fields) -> dict[str, DiskEntry]:
    """The entries of a history, from its manifest."""
    found, entries = manifest.object("entries"), {}
    for key in found.content:
        described = found.object(key)
        entries[key] = described_entry(manifest, key, described.take("dtype", str), described.list_of("shape", int))
        if entries[key] != _KNOWN.get(key, entries[key]) or min(entries[key].shape, default=1) < 1:
            raise manifest.error(f"does not describe '{key}' as an entry of a learning history")
    if missing := {OBSERVATION, ACTION, *_REQUIRED} - entries.keys():
        raise manifest.error(f"does not describe the entries {sorted(missing)}")
    return entries


def _parts_of(manifest: Fields) -> list[Part]:
    """The parts of a history, from its manifest."""
    described = [Fields(part, manifest.path, manifest.remedy, "parts") for part in manifest.list_of("parts", dict)]
    digests = [part.object("sha256") for part in described]
    return [
        Part(part.at_least("first", 0), part.at_least("steps", 1), {key: found.take(key, str) for key in found.content})
        for part, found in zip(described, digests, strict=True)
    ]


def history_files(folder: Path, entries: Mapping[str, DiskEntry], rows: int) -> dict[str, Path]:
    """The files of the entries of ``rows`` steps in all, by :func:`~torchrl_lang.data.dataset_format.entry_file`.

    Raises:
        FileError: a file is missing, or has another size.
    """
    files = {}
    for key, (dtype, shape) in entries.items():
        path = regular_file(file_in(folder, entry_file(key), remedy=REMEDY), REMEDY)
        size = rows * dtype.itemsize * math.prod(shape)  # torch.Size.numel() overflows silently
        if path.stat().st_size != size:
            raise FileError(path, f"has {path.stat().st_size} bytes, expected {size}", REMEDY)
        files[entry_file(key)] = path
    return files


def part_digests(steps: TensorDictBase) -> dict[str, str]:
    """The SHA-256 of each entry of the steps of a part, ``[tasks, streams, L]``."""
    return {key: _digest(steps.get(key)) for key in steps.keys()}


def _digest(value: Tensor) -> str:
    array: Any = value.detach().cpu().contiguous().numpy()
    return hashlib.sha256(memoryview(array).cast("B")).hexdigest()
