"""Windows of learning histories, which cross episodes but never streams, and a split of their tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage
from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter

from torchrl_lang._checks import Count, checked
from torchrl_lang.algorithm_distillation.history import LearningHistory
from torchrl_lang.data.replay import EpochSampler
from torchrl_lang.schema import EPISODE, EPISODE_STEP


class HistoryWindows(EpochSampler):
    """A sampler of windows of ``length`` successive steps of one stream, each once per epoch.

    It returns indices ``[B, length]`` of ``history.flat``, the storage of the replay buffer that it belongs to (see
    :meth:`buffer`). The order depends on seed and epoch only; the state is four integers, see
    :class:`~torchrl_lang.data.replay.EpochSampler`.

    With ``skip_episodes=k`` a window holds every ``k``-th episode only: it is cut from the episodes 0, k, 2k, ... of a
    stream, or 1, k+1, 2k+1, ..., and so on. Each of them is whole and in order; the window may begin and end inside
    one. Fewer episodes then show the same improvement.

    Args:
        history: the learning history.
        length: steps of a window.
        tasks: numbers of the tasks to sample from, such as those of
            :func:`~torchrl_lang.algorithm_distillation.split_tasks`; default all.
        skip_episodes: keep every ``k``-th episode; 1 keeps all.
        at_episode_start: only windows that begin with an episode.
        seed: seed of the orders.

    Raises:
        ValueError: ``tasks`` are not in the history, or no stream has a window of this length.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import HistoryWindows, LearningHistory
        >>> from torchrl_lang.algorithm_distillation.sources import NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> source = NoisyExpert(DarkRoomEnv(3, task=0, batch_size=[1, 4], episode_length=5), 50)
        >>> history = LearningHistory(source.history(), source.tasks)
        >>> windows = HistoryWindows(history, 20, at_episode_start=True, seed=1)
        >>> len(windows), windows.buffer(batch_size=16).sample()["observation"].shape
        (28, torch.Size([16, 20, 2]))
    """

    @checked
    def __init__(
        self,
        history: LearningHistory,
        length: Count,
        *,
        tasks: Sequence[int] | Tensor | None = None,
        skip_episodes: Count = 1,
        at_episode_start: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed)
        self.history, self.length = history, length
        chosen = _task_positions(history, tasks)
        index = history.flat_index()[chosen].flatten(0, 1)  # [N, steps]
        steps = history.steps.select(EPISODE, EPISODE_STEP)[chosen].flatten(0, 1)
        streams = torch.arange(len(index))[:, None]
        # The steps of a group follow each other in a window: a stream's episodes with the same remainder.
        group = (streams * skip_episodes + steps[EPISODE] % skip_episodes).flatten()
        order = group.argsort(stable=True)
        self._in_order, group = index.flatten()[order], group[order]
        starts = group[: max(len(group) - length + 1, 0)] == group[length - 1 :]
        if at_episode_start:
            starts = starts & (steps[EPISODE_STEP].flatten()[order][: len(starts)] == 0)
        self._starts = starts.nonzero().squeeze(-1)
        if not len(self._starts):
            raise ValueError(f"No stream of {index.shape[1]} steps has a window of {length=} with {skip_episodes=}.")

    def __len__(self) -> int:
        """The number of windows of an epoch."""
        return len(self._starts)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Indices of the next windows, int64 ``[batch_size, length]``."""
        picked, info = super().sample(self._starts, batch_size)
        return self._in_order[self._starts[picked][:, None] + torch.arange(self.length)], info

    def buffer(self, batch_size: int) -> TensorDictReplayBuffer:
        """A replay buffer over the history that samples windows, ``[batch_size, length]``; nothing is copied.

        To resume training exactly, save ``buffer.sampler.state_dict()`` and load it into a new buffer's sampler. The
        last batch of an epoch may be smaller.
        """
        storage, writer = TensorStorage(self.history.flat), ImmutableDatasetWriter()
        return TensorDictReplayBuffer(storage=storage, sampler=self, writer=writer, batch_size=batch_size)


def _task_positions(history: LearningHistory, tasks: Sequence[int] | Tensor | None) -> Tensor:
    """The positions in the history of tasks given by their numbers."""
    if tasks is None:
        return torch.arange(len(history.task_numbers))
    wanted = torch.as_tensor(tasks, dtype=torch.int64).flatten()
    found = wanted[:, None] == history.task_numbers
    if not len(wanted) or not found.any(-1).all():
        missing = wanted[~found.any(-1)][:5].tolist()
        raise ValueError(f"tasks must be numbers of tasks in the history, {missing or 'none'} are not.")
    return found.int().argmax(-1).unique()


class TaskSplit(NamedTuple):
    """Numbers of tasks, int64, sorted; no task is in two of them.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import split_tasks
        >>> train, validation, test = split_tasks(8, validation=0.25, test=0.25)
        >>> len(train), validation.shape, test.dtype
        (4, torch.Size([2]), torch.int64)
    """

    train: Tensor
    validation: Tensor
    test: Tensor


def split_tasks(
    tasks: int | Sequence[int] | Tensor, *, validation: float = 0.1, test: float = 0.15, seed: int = 0
) -> TaskSplit:
    """Split tasks at random.

    Args:
        tasks: the numbers of the tasks, each once, or how many there are.
        validation: share of the tasks on which checkpoints are chosen.
        test: share of the tasks that are reported.
        seed: seed of the split.

    Raises:
        ValueError: a number is repeated, a share is negative, or no task is left to train on.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import split_tasks
        >>> split = split_tasks(81, seed=0)
        >>> [len(part) for part in split]
        [61, 8, 12]
    """
    numbers = torch.arange(tasks) if isinstance(tasks, int) else torch.as_tensor(tasks, dtype=torch.int64).flatten()
    held_out = [round(share * len(numbers)) for share in (validation, test)]
    if min(validation, test) < 0 or sum(held_out) >= len(numbers) or len(numbers.unique()) < len(numbers):
        raise ValueError(f"{validation=} and {test=} leave none of {len(numbers)} different tasks to train on.")
    order = numbers[torch.from_numpy(np.random.default_rng(seed).permutation(len(numbers)))]
    parts = order.split([len(numbers) - sum(held_out), *held_out])
    return TaskSplit(*(part.sort().values for part in parts))
