"""A square room in which the agent moves by one cell, and the shortest paths in it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_lang._checks import count, one_of, within
from torchrl_lang.envs.grids.base import HiddenTaskEnv
from torchrl_lang.functional import random_index

__all__ = ["RoomEnv"]

_MOVES = torch.tensor([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
"""Rows and columns that the actions add: stay, up, down, left, right."""

Start = Literal["centre", "random"] | tuple[int, int]


class RoomEnv(HiddenTaskEnv):
    """A room of ``size`` by ``size`` cells without inner walls. Abstract: subclasses define tasks and rewards.

    The number of a cell is ``row * size + column``. The actions are 0 stay, 1 up (to a smaller row), 2 down, 3 left
    and 4 right; a move into a wall stays. The observation is the agent's row and column, int64 ``[*B, 2]``.

    Args:
        size: number of rows and of columns.
        start: where episodes begin: ``"centre"`` (of an even size the lower right one of the four), ``"random"`` (a
            cell drawn for each episode) or a ``(row, column)``.
        cell_states: number of states of each cell.
        **options: as in :class:`~torchrl_lang.envs.grids.HiddenTaskEnv`.

    Raises:
        ValueError: ``size`` is not an integer of at least 2, or ``start`` is unknown or not in the room.

    Examples:
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, start=(0, 2), task=0)
        >>> env.reset()["observation"], env.optimal_actions()
        (tensor([[0, 2]]), tensor([[False, False, False,  True, False]]))
    """

    def __init__(self, size: int, *, start: Start, cell_states: int = 1, **options: Any) -> None:
        count("size", size, low=2)
        self.size, self.start = size, start
        n_states = cell_states * size**2
        super().__init__(n_states=n_states, n_actions=len(_MOVES), observation_shape=(2, size), **options)
        position = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        following = (position[:, None] + _MOVES).clamp(0, size - 1)
        self._position: Tensor
        self._following: Tensor
        self._starts: Tensor
        self.register_buffer("_position", position.to(self.device), persistent=False)
        self.register_buffer("_following", (following @ torch.tensor([size, 1])).to(self.device), persistent=False)
        self.register_buffer("_starts", self._start_cells(start).to(self.device), persistent=False)

    def cell(self, row: int, column: int) -> int:
        """The number of a cell.

        Raises:
            ValueError: the cell is outside the room, or a number is not an integer.
        """
        for place in (row, column):
            count("row and column", place)
            within("row and column", place, 0, self.size - 1)
        return row * self.size + column

    def describe(self) -> dict[str, Any]:
        """The family as JSON."""
        return {**super().describe(), "size": self.size, "start": self.start}

    def _start_cells(self, start: Start) -> Tensor:
        """The cells in which episodes begin, with equal probability, int64 ``[S]``."""
        if start == "random":
            return torch.arange(self.size**2)
        if isinstance(start, str):
            one_of("start", start, ("centre", "random"))
            start = (self.size // 2, self.size // 2)
        return torch.tensor([self.cell(*start)])

    def _start(self, episode: Tensor, task: Tensor) -> Tensor:
        return self._starts[random_index(self._key, 2 * episode, len(self._starts))]

    def _observation(self, state: Tensor) -> Tensor:
        return self._position[state % self.size**2]

    def _distance(self, cell: Tensor, target: Tensor) -> Tensor:
        """Steps of a shortest path, int64; the cells' shapes are broadcast."""
        return (self._position[cell] - self._position[target]).abs().sum(-1)

    def _steps_to_reach(self, cell: Tensor, target: Tensor) -> Tensor:
        """Fewest steps after which the agent has stepped on ``target``: one, to stay, if it is there."""
        return self._distance(cell, target).clamp_min(1)

    def _optimal_moves(self, cell: Tensor, target: Tensor) -> Tensor:
        """The first moves of the shortest paths, bool ``[N, 5]``; only "stay" at the target."""
        distance = self._distance(self._following[cell], target[:, None])
        nearer = distance < self._distance(cell, target)[:, None]
        nearer[:, 0] = cell == target
        return nearer
