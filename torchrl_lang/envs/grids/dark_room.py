"""Dark Room: a room with one goal that the agent cannot see."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.envs.grids.base import TaskOptions
from torchrl_lang.envs.grids.room import RoomEnv, Start

__all__ = ["DarkRoomEnv"]


class DarkRoomEnv(RoomEnv):
    """Find a goal that is hidden, and stay there (arXiv 2210.14215, section 4).

    The task is the number of the goal's cell, so a room of ``size`` 9 has 81 tasks. With ``reward="every_step"`` each
    step that ends at the goal is rewarded with 1, and episodes are only truncated; with ``"once"`` (Dark Room Hard has
    it, with ``size=17``) the first one is rewarded and terminates the episode.

    Args:
        size: number of rows and of columns.
        start: ``"centre"``, ``"random"`` or a ``(row, column)``.
        reward: ``"every_step"`` or ``"once"``.
        episode_length: number of steps after which an episode is truncated.
        **options: ``task``, ``batch_size``, ``seed`` and ``device``, as in
            :class:`~torchrl_lang.envs.grids.HiddenTaskEnv`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(9, task=torch.arange(81), batch_size=[81])
        >>> env.optimal_return()[:3]  # the corner is 8 steps from the centre: the steps 8 to 20 are rewarded
        tensor([13., 14., 15.])
    """

    def __init__(
        self,
        size: int = 9,
        *,
        start: Start = "centre",
        reward: Literal["every_step", "once"] = "every_step",
        episode_length: int = 20,
        **options: Unpack[TaskOptions],
    ) -> None:
        one_of("reward", reward, ("every_step", "once"))
        self.reward = reward
        super().__init__(size, start=start, n_tasks=size**2, episode_length=episode_length, **options)

    def describe(self) -> dict[str, Any]:
        """The family as JSON."""
        return {**super().describe(), "reward": self.reward}

    def _transition(self, state: Tensor, action: Tensor, task: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cell = self._following[state, action]
        found = cell == task
        return cell, found.to(torch.float32), found if self.reward == "once" else torch.zeros_like(found)

    def _optimal_actions(self, state: Tensor, task: Tensor) -> Tensor:
        return self._optimal_moves(state, task)

    def optimal_return(self, task: Tensor | None = None) -> Tensor:
        r"""The mean over starts of ``max(T + 1 - d, 0)``, or of ``d <= T`` with a reward once.

        ``T`` is ``episode_length``, and the agent can be at the goal from step ``d`` on: the length of a shortest path,
        but at least 1.
        """
        steps = self._steps_to_reach(self._starts, self._tasks(task)[..., None])
        left = (self.episode_length + 1 - steps).clamp_min(0)
        return (left.clamp_max(1) if self.reward == "once" else left).to(torch.float32).mean(-1)

    def describe_task(self, task: int) -> dict[str, Any]:
        """The goal's row and column."""
        return {"task": task, "goal": self._position[self._checked_task(task)].tolist()}
