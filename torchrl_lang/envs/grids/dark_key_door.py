"""Dark Key-to-Door: a room with a hidden key, and a hidden door that it opens."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from torchrl_lang.envs.grids.base import TaskOptions
from torchrl_lang.envs.grids.room import RoomEnv, Start

__all__ = ["DarkKeyDoorEnv"]


class DarkKeyDoorEnv(RoomEnv):
    """Find a hidden key, then a hidden door (arXiv 2210.14215, section 4).

    The first step that ends at the key is rewarded with 1; a later step that ends at the door is rewarded with 1 and
    terminates the episode. The observation does not show whether the agent has the key. The task is ``key * size**2 +
    door``, two cells that may be the same. A state is a cell, plus ``size**2`` with the key.

    Args:
        size: number of rows and of columns.
        start: ``"centre"``, ``"random"`` or a ``(row, column)``.
        episode_length: number of steps after which an episode is truncated.
        **options: ``task``, ``batch_size``, ``seed`` and ``device``, as in
            :class:`~torchrl_lang.envs.grids.HiddenTaskEnv`.

    Examples:
        >>> from torchrl_lang.envs.grids import DarkKeyDoorEnv
        >>> env = DarkKeyDoorEnv(9, seed=0)
        >>> env.n_tasks, env.describe_task(env.task_number((0, 8), (4, 4)))
        (6561, {'task': 688, 'key': [0, 8], 'door': [4, 4]})
    """

    def __init__(
        self,
        size: int = 9,
        *,
        start: Start = "random",
        episode_length: int = 50,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(size, start=start, cell_states=2, n_tasks=size**4, episode_length=episode_length, **options)

    def task_number(self, key: tuple[int, int], door: tuple[int, int]) -> int:
        """The task with the key and the door in two cells, each ``(row, column)``.

        Raises:
            ValueError: a cell is outside the room.
        """
        return self.cell(*key) * self.size**2 + self.cell(*door)

    def _transition(self, state: Tensor, action: Tensor, task: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cells = self.size**2
        had_key = state >= cells
        cell = self._following[state % cells, action]
        takes = ~had_key & (cell == task // cells)
        opens = had_key & (cell == task % cells)
        following = torch.where(had_key | takes, cell + cells, cell)
        return following, (takes | opens).to(torch.float32), opens

    def _optimal_actions(self, state: Tensor, task: Tensor) -> Tensor:
        cells = self.size**2
        return self._optimal_moves(state % cells, torch.where(state >= cells, task % cells, task // cells))

    def optimal_return(self, task: Tensor | None = None) -> Tensor:
        """The mean over starts of 2 if key and door can be reached, 1 if only the key can, else 0."""
        number = self._tasks(task)[..., None]
        key, door = number // self.size**2, number % self.size**2
        to_key = self._steps_to_reach(self._starts, key)
        to_door = to_key + self._steps_to_reach(key, door)
        length = self.episode_length
        return ((to_key <= length).to(torch.float32) + (to_door <= length)).mean(-1)

    def describe_task(self, task: int) -> dict[str, Any]:
        """The rows and columns of the key and the door."""
        number = self._checked_task(task)
        key, door = self._position[number // self.size**2], self._position[number % self.size**2]
        return {"task": task, "key": key.tolist(), "door": door.tolist()}
