"""Learning histories: every step of learners on many tasks, in memory or on disk."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation.history_format import (
    REMEDY,
    HistoryManifest,
    Part,
    check_steps,
    check_tasks,
    history_files,
    part_digests,
    read_history_manifest,
    step_entries,
)
from torchrl_lang.data.dataset_format import map_rows

__all__ = ["LearningHistory", "load_history"]


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
            raise ValueError(
                f"The steps of {len(tasks)} tasks have batch size [{len(tasks)}, streams, steps], got "
                f"{list(steps.shape)}."
            )
        step_entries(steps)
        check_steps(steps, None)
        check_tasks(tasks)
        self._hold(steps.reshape(-1), steps.shape, steps.shape[-1], tasks, source or {})

    def _hold(
        self,
        flat: TensorDictBase,
        shape: Sequence[int],
        recorded: int,
        tasks: Sequence[Mapping[str, Any]],
        source: Mapping[str, Any],
    ) -> None:
        self.flat, self._shape, self.recorded = flat, torch.Size(shape), recorded
        self.task_numbers = torch.tensor([task["task"] for task in tasks])
        self.tasks, self.source = [dict(task) for task in tasks], dict(source)

    @property
    def steps(self) -> TensorDictBase:
        """The recorded steps, ``[tasks, streams, L]``, without a copy: writing to them would change the history."""
        return self.flat.view(self._shape)[..., : self.recorded]

    @property
    def complete(self) -> bool:
        """Whether all steps that the writer planned were recorded."""
        return self.recorded == self._shape[-1]

    def flat_index(self) -> Tensor:
        """The index of each recorded step in :attr:`flat`, int64 ``[tasks, streams, L]``."""
        return torch.arange(self._shape.numel()).view(self._shape)[..., : self.recorded]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._shape[0]} tasks, {self._shape[1]} streams, {self.recorded} steps)"


def load_history(folder: str | os.PathLike[str], *, verify: bool = True, unfinished: bool = False) -> LearningHistory:
    """Open a learning history that :class:`~torchrl_lang.algorithm_distillation.HistoryWriter` wrote; its steps stay
    on disk.

    Args:
        folder: the folder.
        verify: read all steps, and compare them with their checksums. Sizes and the manifest are always checked.
        unfinished: accept a history of which some planned steps are missing.

    Raises:
        FileNotFoundError: there is no learning history.
        FileError: the history is damaged, was changed, or has a later version.
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
    manifest = read_history_manifest(folder)
    flat, shape, parts = map_history(folder, manifest), manifest.shape, manifest.parts
    if parts[-1].end < shape[-1] and not unfinished:
        raise ValueError(
            f"The history in {folder} has {parts[-1].end} of {shape[-1]} planned steps: resume its recording, or use "
            f"unfinished=True."
        )
    if verify:
        verify_parts(folder, flat.view(shape), parts)
    history = LearningHistory.__new__(LearningHistory)
    history._hold(flat.lock_(), shape, parts[-1].end, manifest.tasks, manifest.source)
    return history


def map_history(folder: Path, manifest: HistoryManifest) -> TensorDictBase:
    """The memory-mapped steps of a history as one dimension."""
    rows = math.prod(manifest.shape)
    return map_rows(history_files(folder, manifest.entries, rows), rows, manifest.entries)


def verify_parts(folder: Path, steps: TensorDictBase, parts: Sequence[Part]) -> None:
    """Compare steps ``[tasks, streams, planned steps]`` with the digests of their parts, and check their values.

    Raises:
        FileError: a part differs.
    """
    before = None
    for part in parts:
        block = steps[..., part.first : part.end]
        found = part_digests(block)
        if changed := sorted(key for key in found if found[key] != part.digests[key]):
            raise FileError(folder, f"has other {changed} than it recorded in steps {part.first} to {part.end}", REMEDY)
        try:
            check_steps(block, before, part.first)
        except ValueError as error:
            raise FileError(folder, f"holds impossible steps ({error})", REMEDY) from error
        before = block[..., -1:]
