"""Mazes on a grid, and how they are described in words, as in LMRL-Gym (arXiv 2311.18232)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Observation = Literal["partial", "full"]
"""The agent is shown the walls around it (``"partial"``), or also the goal's position and its own (``"full"``)."""

MOVES = {"move left": (0, -1), "move right": (0, 1), "move up": (-1, 0), "move down": (1, 0)}
"""The actions, and the row and column by which each moves the agent."""

STAY = len(MOVES)
"""The number, after those of the moves, of what is no move."""

SUCCESS, FAILURE = "Success", "Failure"
"""The replies to the move that reaches the goal, and to the turn after the last move."""

DOUBLE_T = """
#############
#.....#.....#
###.#####.###
###.#####.###
###.#####.###
###.......###
######.######
######.######
######G######
#############
"""
"""The maze of LMRL-Gym: two T-shaped parts that meet in a third one."""

_SIDES = {"to your right": (0, 1), "to your left": (0, -1), "above you": (-1, 0), "below you": (1, 0)}


class Maze:
    r"""A maze: a grid of free cells and walls, with a goal. Cells are numbered from 0 in reading order.

    Args:
        plan: one line a row: ``#`` a wall, ``.`` a free cell, ``G`` the goal; walls all around.

    Raises:
        ValueError: the plan has other characters, an open border or not one goal, or no path from a cell to it.

    Examples:
        >>> from torchrl_lang.envs.maze import Maze
        >>> maze = Maze()
        >>> len(maze.cells), maze.cells[maze.goal]
        (26, (8, 6))
        >>> maze.text(1, "partial")
        'There are walls above you, below you.'
        >>> Maze("####\n#.G#\n####").following.tolist()
        [[0, 1, 0, 0, 0], [0, 1, 1, 1, 1]]
    """

    cells: tuple[tuple[int, int], ...]
    """Row and column of each free cell."""
    goal: int
    """The number of the goal's cell."""
    starts: Tensor
    """int64 ``[S]``, the numbers of all other cells."""
    following: Tensor
    """int64 ``[C, 5]``, the cell after each of the :data:`MOVES`, and after what is no move."""

    def __init__(self, plan: str = DOUBLE_T) -> None:
        lines = plan.split()
        edge = {*"".join([*lines[:1], *lines[-1:], *(line[0] + line[-1] for line in lines)])}
        rectangle = edge == {"#"} and len({*map(len, lines)}) == 1
        if not rectangle or {*plan} - {"\n"} != {*"#.G"} or plan.count("G") != 1:
            raise ValueError(f"A maze is lines of #, . and one G, of one length, with walls all around, got {plan!r}.")
        free = [(row, column) for row, line in enumerate(lines) for column, at in enumerate(line) if at != "#"]
        number = {cell: index for index, cell in enumerate(free)}
        steps = [*MOVES.values(), (0, 0)]
        following = [[number.get((y + down, x + right), number[y, x]) for down, right in steps] for y, x in free]
        self.cells, self.following = tuple(free), torch.tensor(following)
        is_goal = torch.tensor([lines[y][x] == "G" for y, x in free])
        self.goal, self.starts = int(is_goal.long().argmax()), (~is_goal).nonzero()[:, 0]
        leads_there = is_goal
        for _ in free:
            leads_there = leads_there[self.following].any(-1)
        if not leads_there.all():
            raise ValueError(f"No path leads from {free[int(leads_there.long().argmin())]} to the goal of {plan!r}.")

    def text(self, cell: int, observation: Observation) -> str:
        """Describe a cell as the agent is shown it, without the line break at the end."""
        row, column = self.cells[cell]
        walls = [side for side, (down, right) in _SIDES.items() if (row + down, column + right) not in self.cells]
        around = "There are no walls near you."
        if walls:
            around = f"There {'is a wall' if len(walls) == 1 else 'are walls'} {', '.join(walls)}."
        if observation == "partial":
            return around
        goal, own = (_digits(self.cells[each]) for each in (self.goal, cell))
        return f"The goal is at position {goal}. Your current position is at position {own}. {around}"


def _digits(cell: tuple[int, int]) -> str:
    """A position as LMRL-Gym writes it, with a space between digits: ``1, 1 0``."""
    return ", ".join(" ".join(str(number)) for number in cell)
