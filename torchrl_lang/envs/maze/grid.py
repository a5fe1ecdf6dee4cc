"""Mazes on a grid, and how they are described in words, as in LMRL-Gym (arXiv 2311.18232)."""

from __future__ import annotations

from typing import Literal

import torch

Observation = Literal["partial", "full"]
"""What the agent is told: ``"partial"``, the walls around it; ``"full"``, also the goal's position and its own."""

MOVES = {"move left": (0, -1), "move right": (0, 1), "move up": (-1, 0), "move down": (1, 0)}
"""The actions, and the row and column by which each moves the agent."""

STAY = len(MOVES)
"""The number, after those of the moves, of what is no move."""

SUCCESS, FAILURE = "Success", "Failure"

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
"""The maze of LMRL-Gym: two T-junctions that lead to a third one."""

_SIDES = {"to your right": (0, 1), "to your left": (0, -1), "above you": (-1, 0), "below you": (1, 0)}


class Maze:
    """A maze: a grid of free cells and walls, with a goal.

    Args:
        plan: one line a row: ``#`` a wall, ``.`` a free cell, ``G`` the goal; walls all around.

    Attributes:
        cells: row and column of each free cell, in reading order, from 0.
        goal: index of the goal's cell.
        starts: int64 ``[S]``, the indices of all other cells.
        following: int64 ``[C, 5]``, the cell after each of the :data:`MOVES`, and after what is no move.

    Raises:
        ValueError: the plan has other characters, an open border or not one goal, or no path from a cell to it.

    Examples:
        >>> from torchrl_lang.envs.maze import Maze
        >>> maze = Maze()
        >>> len(maze.cells), maze.cells[maze.goal]
        (26, (8, 6))
        >>> maze.text(1, "partial")
        'There are walls above you, below you.'
        >>> Maze("####\\n#.G#\\n####").text(0, "full")
        'The goal is at position 1, 2. Your current position is at position 1, 1. There are walls to your left, \
above you, below you.'
    """

    def __init__(self, plan: str = DOUBLE_T) -> None:
        lines = plan.split()
        free = [(row, column) for row, line in enumerate(lines) for column, at in enumerate(line) if at != "#"]
        edge = {*"".join([*lines[:1], *lines[-1:], *(line[0] + line[-1] for line in lines)])}
        if edge != {"#"} or not {*plan} <= {*"#.G\n"} or plan.count("G") != 1 or len({*map(len, lines)}) > 1:
            raise ValueError(f"A maze is lines of #, . and one G, of one length, with walls all around, got {plan!r}.")
        number = {cell: index for index, cell in enumerate(free)}
        self.cells = tuple(free)
        self.goal = next(number[row, column] for row, column in free if lines[row][column] == "G")
        steps = [*MOVES.values(), (0, 0)]
        leads = [[number.get((row + down, column + right), number[row, column]) for down, right in steps] for row, column in free]
        self.following = torch.tensor(leads)
        self.starts = torch.tensor([cell for cell in range(len(free)) if cell != self.goal], dtype=torch.int64)
        reached = torch.arange(len(free)) == self.goal
        for _ in free:
            reached = reached[self.following].any(-1)
        if not reached.all() or not len(self.starts):
            raise ValueError(f"From {self.cells[int(reached.long().argmin())]} no path leads to the goal of {plan!r}.")

    def text(self, cell: int, observation: Observation) -> str:
        """What the agent is told in a cell, without the line break at its end."""
        row, column = self.cells[cell]
        walls = [side for side, (down, right) in _SIDES.items() if (row + down, column + right) not in self.cells]
        told = "There are no walls near you."
        if walls:
            told = f"There {'is a wall' if len(walls) == 1 else 'are walls'} {', '.join(walls)}."
        if observation == "partial":
            return told
        goal, own = (_digits(self.cells[each]) for each in (self.goal, cell))
        return f"The goal is at position {goal}. Your current position is at position {own}. {told}"


def _digits(cell: tuple[int, int]) -> str:
    """A position as LMRL-Gym writes it, with a space between digits: ``1, 1 0``."""
    return ", ".join(" ".join(str(number)) for number in cell)
