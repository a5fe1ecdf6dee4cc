"""Families of tasks with a hidden parameter, and which of their tasks are trained on, validated on and reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.algorithm_distillation.windows import TaskSplit, split_tasks
from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv, HiddenTaskEnv, random_bandits
from torchrl_lang.recipes.options import Options, option

__all__ = ["FamilyName", "FamilyOptions", "TaskFamily"]

FamilyName = Literal["dark_room", "dark_key_door", "bandit"]

_LENGTHS: dict[FamilyName, int] = {"dark_room": 20, "dark_key_door": 50, "bandit": 10}
"""Steps of an episode; a bandit's episodes are short, as their ends mean nothing to it."""


@dataclass(frozen=True, kw_only=True)
class FamilyOptions(Options):
    """Options that define the tasks."""

    env: FamilyName = option("dark_room", "family of tasks")
    size: int = option(7, "rows and columns of a room", at_least=2, at_most=64)
    start: Literal["centre", "random"] = option("centre", "where an episode in a room begins")
    arms: int = option(10, "arms of a bandit", at_least=2)
    episode_length: int | None = option(
        None, "steps of an episode; none: 20 in dark_room, 50 in dark_key_door, 10 of a bandit", at_least=1
    )
    tasks: int | None = option(
        None, "number of tasks, drawn at random; none: all of dark_room, 1,000 of the others", at_least=3
    )
    validation: float = option(0.1, "share of the tasks on which checkpoints are chosen", above=0, below=1)
    test: float = option(0.15, "share of the tasks that are reported", above=0, below=1)
    split_seed: int = option(0, "seed of the tasks and of their split", at_least=0)

    def family(self) -> TaskFamily:
        """The tasks."""
        length = _LENGTHS[self.env] if self.episode_length is None else self.episode_length
        return TaskFamily(self.env, length, self.size, self.start, self.arms, self._numbers(), self._shares)

    @property
    def _shares(self) -> dict[str, Any]:
        return {"validation": self.validation, "test": self.test, "seed": self.split_seed}

    def _numbers(self) -> Tensor:
        """The numbers of the tasks, sorted."""
        if self.env == "bandit":
            return torch.arange(1000 if self.tasks is None else self.tasks)
        every = torch.arange(self.size**4 if self.env == "dark_key_door" else self.size**2)
        if self.env == "dark_room" and self.start == "centre":  # a goal where each episode begins needs no search
            every = every[every != (self.size // 2) * (self.size + 1)]
        if self.tasks is not None and self.tasks > len(every):
            raise ValueError(f"tasks must be at most {len(every)} in this room of size={self.size}, got {self.tasks}.")
        chosen = torch.randperm(len(every), generator=torch.Generator().manual_seed(self.split_seed))
        return every[chosen[: self.tasks or (len(every) if self.env == "dark_room" else 1000)]].sort().values


class TaskFamily:
    """A family of tasks, split.

    Args:
        name: of the family.
        episode_length: steps of an episode.
        size, start: of a room.
        arms: of a bandit.
        numbers: of the tasks, int64.
        split: options of :func:`~torchrl_lang.algorithm_distillation.split_tasks`.

    Attributes:
        split: the tasks to train on, to validate on and to report.

    Raises:
        ValueError: the name is unknown, or a part of the split has no task.

    Examples:
        >>> from torchrl_lang.recipes.algorithm_distillation.families import FamilyOptions
        >>> family = FamilyOptions(size=5).family()
        >>> [len(part) for part in family.split], family.env(family.split.test, streams=16).batch_size
        ([18, 2, 4], torch.Size([4, 16]))
    """

    def __init__(
        self,
        name: FamilyName,
        episode_length: int,
        size: int,
        start: Literal["centre", "random"],
        arms: int,
        numbers: Tensor,
        split: dict[str, Any],
    ) -> None:
        one_of("env", name, get_args(FamilyName))
        self.name, self.episode_length = name, episode_length
        self._room: dict[str, Any] = {"size": size, "start": start}
        self.split: TaskSplit = split_tasks(numbers, **split)
        if empty := [part for part, held_out in self.split._asdict().items() if not len(held_out)]:
            raise ValueError(
                f"{len(numbers)} tasks leave none for {' and '.join(empty)}: give more tasks, or larger shares."
            )
        self._arms = random_bandits(len(numbers), arms, seed=split["seed"]) if name == "bandit" else None

    def env(self, tasks: Tensor, streams: int) -> HiddenTaskEnv:
        """An environment of batch size ``[tasks, streams]`` with one task in each row."""
        rows: dict[str, Any] = {
            "task": tasks[:, None],
            "batch_size": [len(tasks), streams],
            "episode_length": self.episode_length,
        }
        if self._arms is not None:
            return BernoulliBanditEnv(self._arms, **rows)
        return (DarkRoomEnv if self.name == "dark_room" else DarkKeyDoorEnv)(**self._room, **rows)

    def describe(self) -> dict[str, Any]:
        """The family and its split as JSON."""
        about = self.env(self.split.train[:1], 1).describe()
        return {**about, **{name: part.tolist() for name, part in self.split._asdict().items()}}
