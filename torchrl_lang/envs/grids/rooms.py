"""Square rooms in which the agent moves by one cell and looks for what it cannot see (arXiv 2210.14215)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Unpack

import torch
from torch import Tensor

from torchrl_lang._checks import check_options, checked
from torchrl_lang.envs.grids.base import HiddenTaskEnv, TaskOptions
from torchrl_lang.functional.random import random_index

_MOVES = torch.tensor([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
"""Rows and columns that the actions add: stay, up, down, left, right."""

Start = Literal["centre", "random"] | tuple[int, int]


def room_image(position: Tensor, action: Tensor, symmetry: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Places and actions in a room that is mirrored or turned: one of the eight symmetries of a square.

    A learner's steps in a room are, seen so, those of a learner in the room with its goals moved likewise.

    Args:
        position: rows and columns, int64 ``[*B, 2]``.
        action: int64 ``[*B]``.
        symmetry: int64 that broadcasts to ``[*B]``, 0 to 7. Its bit of value 1 exchanges up and down, that of 2 left
            and right, and then that of 4 rows and columns; 0 changes nothing.
        size: number of rows and of columns.

    Returns:
        Both, of the shapes that came.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.grids.rooms import room_image
        >>> position, up = torch.tensor([0, 2]), torch.tensor(1)
        >>> [room_image(position, up, torch.tensor(number), size=9) for number in (1, 4)]
        [(tensor([8, 2]), tensor(2)), (tensor([2, 0]), tensor(3))]
    """
    return _image(position, symmetry, size - 1), _ACTION_IMAGES[symmetry, action]


def _image(vector: Tensor, symmetry: Tensor, largest: int) -> Tensor:
    bits = symmetry.unsqueeze(-1)
    mirrored = torch.where((bits & torch.tensor([1, 2])).bool(), largest - vector, vector)
    return torch.where((bits & 4).bool(), mirrored.flip(-1), mirrored)


# A move is mirrored at its middle, 0.
_ACTION_IMAGES = (_image(_MOVES, torch.arange(8)[:, None], 0)[:, :, None] == _MOVES).all(-1).int().argmax(-1)
"""The action that an action becomes, by symmetry and action."""


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

    @checked
    def __init__(self, size: Annotated[int, 2], *, start: Start, cell_states: int = 1, **options: Any) -> None:
        self.size, self.start = size, start
        n_states = cell_states * size**2
        super().__init__(n_states=n_states, n_actions=len(_MOVES), observation_shape=(2, size), **options)
        position = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        following = (position[:, None] + _MOVES).clamp(0, size - 1) @ torch.tensor([size, 1])
        self._position: Tensor
        self._following: Tensor
        self._starts: Tensor
        tables = {"_position": position, "_following": following, "_starts": self._start_cells(start)}
        for name, table in tables.items():
            self.register_buffer(name, table.to(self.device), persistent=False)

    @checked
    def cell(self, row: Annotated[int, 0], column: Annotated[int, 0]) -> int:
        """The number of a cell.

        Raises:
            ValueError: the cell is outside the room, or a number is not an integer.
        """
        check_options(row=(row, range(self.size)), column=(column, range(self.size)))
        return row * self.size + column

    def describe(self) -> dict[str, Any]:
        """The family as JSON."""
        return {**super().describe(), "size": self.size, "start": self.start}

    def _start_cells(self, start: Start) -> Tensor:
        """The cells in which episodes begin, with equal probability, int64 ``[S]``."""
        if start == "random":
            return torch.arange(self.size**2)
        middle = self.size // 2
        match (middle, middle) if start == "centre" else start:
            case (row, column):
                return torch.tensor([self.cell(row, column)])
        raise ValueError(f"start must be 'centre', 'random' or (row, column), got {start!r}.")

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

    @checked
    def __init__(
        self,
        size: int = 9,
        *,
        start: Start = "centre",
        reward: Literal["every_step", "once"] = "every_step",
        episode_length: int = 20,
        **options: Unpack[TaskOptions],
    ) -> None:
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
        return {"task": task, "goal": self._position[self._task_numbers(task)].tolist()}


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
        self, size: int = 9, *, start: Start = "random", episode_length: int = 50, **options: Unpack[TaskOptions]
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
        number = self._task_numbers(task)
        key, door = self._position[number // self.size**2], self._position[number % self.size**2]
        return {"task": task, "key": key.tolist(), "door": door.tolist()}
