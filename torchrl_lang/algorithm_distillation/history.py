"""Learning histories: every step of learners on many tasks, in memory or on disk."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase
from torch import Tensor

from torchrl_lang import schema
from torchrl_lang._files import FileError, Record, regular_file, shorten
from torchrl_lang.schema import ACTION, ACTION_LOG_PROB, DONE, EPISODE, EPISODE_STEP, OBSERVATION, REWARD, TERMINATED


class LearningHistory:
    """The steps of learners, keyed (task, stream, step): a stream is one learner's life on one task.

    ====================  =============================  ===============================================================
    key                   dtype, shape                   meaning
    ====================  =============================  ===============================================================
    ``observation``       ``[tasks, streams, L, ...]``   what the learner read before it acted
    ``action``            ``[tasks, streams, L, ...]``   what it did
    ``reward``            float32 ``[..., L, 1]``        what it earned
    ``done``              bool ``[..., L, 1]``           the step ended its episode
    ``terminated``        bool ``[..., L, 1]``           the task ended; a done step that is not terminated is truncated
    ``action_log_prob``   float32 ``[..., L]``           log-probability of the action under the learner, if known
    ``episode``           int64 ``[..., L]``             number of the step's episode in its stream, from 0
    ``episode_step``      int64 ``[..., L]``             number of the step in its episode, from 0
    ====================  =============================  ===============================================================

    Observations, actions, rewards and log-probabilities are finite. Further entries, bool, int64 or float32, are kept.

    Args:
        steps: the steps, ``[tasks, streams, L]``.
        tasks: a description of each task as JSON, with its number as ``"task"``.
        source: a description of the learners as JSON.

    Attributes:
        tasks: the descriptions.
        source: the description of the learners.
        task_numbers: int64 ``[tasks]``.

    Raises:
        KeyError: an entry is missing.
        ValueError: the steps do not fit the table, or their flags and numbers contradict each other.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import LearningHistory
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.tensor([[3], [17]]), batch_size=[2, 4])
        >>> source = NoisyExpert(env, 100)
        >>> history = LearningHistory(source.history(), source.tasks)
        >>> history.steps.shape, history.tasks[1]
        (torch.Size([2, 4, 100]), {'task': 17, 'goal': [3, 2]})
    """

    def __init__(
        self, steps: TensorDictBase, tasks: Sequence[Mapping[str, Any]], *, source: Mapping[str, Any] | None = None
    ) -> None:
        if steps.ndim != 3 or steps.shape[0] != len(tasks) or not steps.numel():
            raise ValueError(f"The steps of {len(tasks)} tasks have another batch size: {list(steps.shape)}.")
        entries_of(steps)
        check_steps(steps)
        check_tasks(tasks)
        self.tasks, self.source = [dict(task) for task in tasks], dict(source or {})
        self._hold(steps.reshape(-1), steps.shape, steps.shape[-1])

    def _hold(self, flat: TensorDictBase, shape: torch.Size, recorded: int) -> None:
        """Keep all planned steps, of which this many were recorded."""
        self.flat, self._shape, self.recorded = flat, shape, recorded
        self.task_numbers = torch.tensor([task["task"] for task in self.tasks])

    @property
    def steps(self) -> TensorDictBase:
        """The recorded steps, ``[tasks, streams, L]``, without a copy: writing to them would change the history."""
        return self.flat.view(self._shape)[..., : self.recorded]

    def flat_index(self) -> Tensor:
        """The index of each recorded step in :attr:`flat`, int64 ``[tasks, streams, L]``."""
        return torch.arange(self._shape.numel()).view(self._shape)[..., : self.recorded]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shape[0]} tasks, {self._shape[1]} streams, {self.recorded} steps)"


# -- steps -------------------------------------------------------------------------------------------------------------

_DTYPES = {"bool": torch.bool, "int64": torch.int64, "float32": torch.float32}


class StoredEntry(Record):
    """The dtype and shape of an entry of one step."""

    dtype: Literal["bool", "int64", "float32"]
    shape: tuple[Annotated[int, Field(ge=1)], ...] = ()

    def size(self, steps: int) -> int:
        """Bytes of this entry of a number of steps; ``torch.Size.numel()`` would overflow silently."""
        return steps * _DTYPES[self.dtype].itemsize * math.prod(self.shape)


_KNOWN = {
    REWARD: StoredEntry(dtype="float32", shape=(1,)),
    DONE: StoredEntry(dtype="bool", shape=(1,)),
    TERMINATED: StoredEntry(dtype="bool", shape=(1,)),
    EPISODE: StoredEntry(dtype="int64"),
    EPISODE_STEP: StoredEntry(dtype="int64"),
    ACTION_LOG_PROB: StoredEntry(dtype="float32"),
}
"""The entries with a fixed dtype and shape of a step; a history also has an observation and an action."""
REQUIRED = {OBSERVATION, ACTION, *_KNOWN} - {ACTION_LOG_PROB}


def entries_of(steps: TensorDictBase) -> dict[str, StoredEntry]:
    """How the entries of steps ``[tasks, streams, L]`` are stored.

    Raises:
        KeyError: an entry that every history has is missing.
        ValueError: an entry has a dtype or a shape that a history cannot store.
    """
    found = dict[str, StoredEntry]()
    for key in sorted(REQUIRED | set(steps.keys())):
        value = schema.entry(steps, key)
        dtype: Any = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
        shape, known = tuple(value.shape[3:]), _KNOWN.get(key)
        if dtype in _DTYPES and 0 not in shape and key.isidentifier():
            found[key] = StoredEntry(dtype=dtype, shape=shape)
        if key not in found or known not in (None, found[key]):
            expected = f"expected {known or 'bool, int64 or float32, with sizes of at least 1'}"
            raise ValueError(f"'{key}' of a step is {dtype} of shape {list(shape)}, {expected}.")
    return found


def check_tasks(tasks: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless each task is described with a number of its own as ``"task"``."""
    numbers = [task.get("task") for task in tasks]
    if not numbers or any(type(number) is not int for number in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(f'Each task of a history has a number of its own as "task", got {shorten(list(tasks))}.')


def check_steps(steps: TensorDictBase, before: TensorDictBase | None = None, first: int = 0) -> None:
    """Raise ValueError unless steps ``[tasks, streams, L]`` are finite and continue those before.

    Args:
        steps: the steps, of which the first one is number ``first``.
        before: the step before, ``[tasks, streams, 1]``; None at the beginning.
        first: the number of the first step.
    """
    for what, bad in _faults(steps, before).items():
        if bad.any():
            task, stream, step = bad.nonzero()[0].tolist()
            where = f"(task {task}, stream {stream}, step {first + step} is the first)"
            raise ValueError(f"{int(bad.sum())} steps {what} {where}: record finite numbers, and count from 0.")


def _faults(steps: TensorDictBase, before: TensorDictBase | None) -> dict[str, Tensor]:
    """Bool ``[tasks, streams, L]`` by the reason why steps are impossible."""
    keys = (DONE, TERMINATED, EPISODE, EPISODE_STEP)
    done, terminated, episode, step = (steps.get(key).flatten(2) for key in keys)
    if before is None:
        last_episode = torch.zeros_like(episode[..., :1])
        over, last_step = last_episode.bool(), last_episode - 1
    else:
        over, last_episode, last_step = (before.get(key).flatten(2) for key in (DONE, EPISODE, EPISODE_STEP))
    over = torch.cat([over, done[..., :-1]], -1)
    wanted_episode = torch.cat([last_episode, episode[..., :-1]], -1) + over
    wanted_step = torch.where(over, 0, torch.cat([last_step, step[..., :-1]], -1) + 1)
    numbers = [key for key in (OBSERVATION, ACTION, REWARD, ACTION_LOG_PROB) if key in steps.keys()]
    return {
        "are terminated but not done": terminated & ~done,
        **{f"have a non-finite '{key}'": ~steps.get(key)[..., None].isfinite().flatten(3).all(-1) for key in numbers},
        f"have another '{EPISODE}' than the steps before require": episode != wanted_episode,
        f"have another '{EPISODE_STEP}' than the steps before require": step != wanted_step,
    }  # fmt: skip


# -- the folder --------------------------------------------------------------------------------------------------------

MANIFEST, ROWS = "manifest.json", "rows"
REMEDY = "the learning history is damaged, record it again"


class Part(Record):
    """Steps that were appended together."""

    first: int
    steps: Annotated[int, Field(ge=1)]
    sha256: dict[str, str]
    """Of each entry of these steps, ``[tasks, streams, steps, ...]``."""

    @property
    def end(self) -> int:
        """The number of the first step after the part."""
        return self.first + self.steps


class HistoryManifest(Record):
    """The description of a learning history on disk."""

    FORMAT: ClassVar[str] = "torchrl_lang learning history"

    tasks: list[dict[str, Any]]
    streams: Annotated[int, Field(ge=1)]
    steps: Annotated[int, Field(ge=1)]
    """Planned steps of each stream."""
    source: dict[str, Any]
    entries: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], StoredEntry]
    parts: Annotated[tuple[Part, ...], Field(min_length=1)]
    created_by: dict[str, str]

    @model_validator(mode="after")
    def _fit(self) -> HistoryManifest:
        check_tasks(self.tasks)
        end = 0
        for part in self.parts:
            if part.first != end or part.sha256.keys() != self.entries.keys():
                raise ValueError(f"a part of {part.steps} steps from step {part.first}, expected one from {end}")
            end = part.end
        missing = REQUIRED - self.entries.keys()
        if end > self.steps or missing or any(kind != _KNOWN.get(key, kind) for key, kind in self.entries.items()):
            raise ValueError(f"{end} of {self.steps} steps with the entries {shorten(self.entries)}")
        return self

    @property
    def shape(self) -> torch.Size:
        """Tasks, streams and planned steps."""
        return torch.Size([len(self.tasks), self.streams, self.steps])


def read_manifest(folder: Path) -> HistoryManifest:
    """The manifest of a learning history.

    Raises:
        FileNotFoundError: there is no learning history.
        FileError: the manifest is damaged or describes something else.
    """
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"There is no learning history in {folder}: {MANIFEST} is missing. Record it first.")
    return HistoryManifest.read(folder / MANIFEST, remedy=REMEDY)


def entry_file(folder: Path, key: str) -> Path:
    """The file of an entry."""
    return folder / ROWS / f"{key}.memmap"


def map_steps(folder: Path, entries: Mapping[str, StoredEntry], shape: torch.Size) -> TensorDict:
    """The memory-mapped steps of a history as one dimension.

    Raises:
        FileError: a file is missing, or has another size.
    """
    mapped, steps = {}, math.prod(shape)
    for key, kind in entries.items():
        path = regular_file(entry_file(folder, key), REMEDY)
        if path.stat().st_size != kind.size(steps):
            raise FileError(path, f"has {path.stat().st_size} bytes, expected {kind.size(steps)}", REMEDY)
        mapped[key] = MemoryMappedTensor.from_filename(path, _DTYPES[kind.dtype], torch.Size([steps, *kind.shape]))
    return TensorDict(mapped, batch_size=[steps])


def digests_of(steps: TensorDictBase) -> dict[str, str]:
    """The SHA-256 of each entry of steps ``[tasks, streams, L]``."""
    arrays: dict[str, Any] = {key: value.detach().cpu().contiguous().numpy() for key, value in steps.items()}
    return {key: hashlib.sha256(memoryview(array).cast("B")).hexdigest() for key, array in arrays.items()}


def verify_parts(folder: Path, steps: TensorDictBase, parts: Sequence[Part]) -> None:
    """Compare steps ``[tasks, streams, planned steps]`` with the digests of their parts.

    Raises:
        FileError: a part differs.
    """
    for part in parts:
        found = digests_of(steps[..., part.first : part.end])
        if changed := sorted(key for key in found if found[key] != part.sha256[key]):
            raise FileError(folder, f"has other {changed} than it recorded in steps {part.first} to {part.end}", REMEDY)


def load_history(folder: str | Path, *, verify: bool = True, unfinished: bool = False) -> LearningHistory:
    """Open a learning history that :class:`HistoryWriter` wrote; its steps stay on disk.

    Args:
        folder: the folder.
        verify: read all steps, and compare them with their checksums. Sizes and the manifest are always checked.
        unfinished: accept a history of which some planned steps are missing.

    Raises:
        FileNotFoundError: there is no learning history.
        FileError: the history is damaged, was changed, or has another version.
        ValueError: the history is unfinished.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_lang.algorithm_distillation import load_history, record_history
        >>> from torchrl_lang.algorithm_distillation.sources import UCB
        >>> from torchrl_lang.envs.grids import BernoulliBanditEnv, random_bandits
        >>> env = BernoulliBanditEnv(random_bandits(5, 3), task=torch.arange(5)[:, None], batch_size=[5, 2])
        >>> with tempfile.TemporaryDirectory() as home:
        ...     _ = record_history(home, UCB(env, 300))
        ...     load_history(home)
        LearningHistory(5 tasks, 2 streams, 300 steps)
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    shape, recorded = manifest.shape, manifest.parts[-1].end
    flat = map_steps(folder, manifest.entries, shape)
    if recorded < shape[-1] and not unfinished:
        raise ValueError(f"{folder} has {recorded} of {shape[-1]} planned steps: resume it, or use unfinished=True.")
    if verify:
        verify_parts(folder, flat.view(shape), manifest.parts)
    history = LearningHistory.__new__(LearningHistory)
    history.tasks, history.source = manifest.tasks, manifest.source
    history._hold(flat.lock_(), shape, recorded)
    return history
