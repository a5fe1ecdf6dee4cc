"""What every source of learning histories is: tasks, streams, and the steps of their learners in blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from torchrl_lang._checks import at_least_one

__all__ = ["HistorySource"]


class HistorySource(ABC):
    """Runs learners and yields their steps. Abstract: a subclass implements :meth:`blocks` and :meth:`options`.

    A stream is one learner's whole life on one task, over many episodes. :meth:`blocks` begins all streams again at
    each call and yields the same history every time: ``observation``, ``action``, ``reward``, ``done``,
    ``terminated``, ``action_log_prob``, ``episode`` and ``episode_step`` of every step, the columns of
    :class:`~torchrl_lang.algorithm_distillation.LearningHistory`.

    Args:
        tasks: a description of each task as JSON, with its number as ``"task"``.
        streams: number of streams of each task.
        steps: steps of each stream.
        seed: seed of the environments, the learners and their actions.

    Attributes:
        tasks: the descriptions.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import HistorySource, QLearning
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> source = QLearning(DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 2]), 500)
        >>> isinstance(source, HistorySource), source.streams, source.steps
        (True, 2, 500)
        >>> [block.shape for block in source.blocks(200)]
        [torch.Size([25, 2, 200]), torch.Size([25, 2, 200]), torch.Size([25, 2, 100])]
    """

    def __init__(self, tasks: Sequence[Mapping[str, Any]], streams: int, steps: int, *, seed: int = 0) -> None:
        at_least_one("streams", streams)
        at_least_one("steps", steps)
        self.tasks = [dict(task) for task in tasks]
        self.streams, self.steps, self.seed = streams, steps, seed

    @abstractmethod
    def blocks(self, length: int = 200) -> Iterator[TensorDict]:
        """Run all streams and yield their steps, ``[tasks, streams, length]``; the last block may be shorter."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""

    def describe(self) -> dict[str, Any]:
        """Algorithm, options and seed as JSON, for the manifest of a history."""
        return {"algorithm": type(self).__name__, "seed": self.seed, **self.options()}

    def history(self) -> TensorDict:
        """The whole history in memory, ``[tasks, streams, steps]``."""
        return torch.cat(list(self.blocks()), -1)
