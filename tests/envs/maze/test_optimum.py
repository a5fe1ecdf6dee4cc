"""The exact optima against searches written from their definitions on the plan of the maze."""

from functools import cache

import pytest
import torch

from torchrl_lang.envs.maze import Beliefs, Maze, maze_texts, reactive_optimum, reactive_return
from torchrl_lang.envs.maze.env import DOUBLE_T

STEPS = [(0, -1), (0, 1), (-1, 0), (1, 0)]


class Search:
    """Best play by recursion over the numbers of moves left, on sets of cells as pairs of row and column."""

    def __init__(self, plan, told):
        self.plan = {(y, x): at for y, line in enumerate(plan.split()) for x, at in enumerate(line)}
        self.starts = frozenset(cell for cell, at in self.plan.items() if at == ".")
        self.told = told  # of a cell: what distinguishes it from others
        self.best = cache(self._best)

    def walls(self, cell):
        return tuple(self.plan[cell[0] + y, cell[1] + x] == "#" for y, x in STEPS)

    def parts(self, cells):
        by_text = {}
        for cell in cells:
            by_text.setdefault(self.told(self, cell), set()).add(cell)
        return map(frozenset, by_text.values())

    def _best(self, cells, moves):
        """The least number of moves of all cells together that miss the goal, if only so many are counted."""
        if not cells or not moves:
            return 0
        found = []
        for y, x in STEPS:
            after = [(a + y, b + x) if self.plan[a + y, b + x] != "#" else (a, b) for a, b in cells]
            left = [cell for cell in after if self.plan[cell] != "G"]
            found.append(len(left) + sum(self.best(part, moves - 1) for part in self.parts(left)))
        return min(found)

    def mean_return(self):
        return -sum(self.best(part, 60) for part in self.parts(self.starts)) / len(self.starts)


SMALL = "#######\n#...#.#\n#.#.#.#\n#.#...#\n#.###.#\n#..G..#\n#######"


@pytest.mark.parametrize("plan", [DOUBLE_T, SMALL], ids=["double_t", "small"])
@pytest.mark.parametrize("observation", ["full", "partial"])
def test_best_play_with_memory_is_that_of_a_search(plan, observation):
    told = Search.walls if observation == "partial" else lambda self, cell: cell
    assert Beliefs(Maze(plan), observation).mean_return == pytest.approx(Search(plan, told).mean_return())


def test_the_optima_of_the_paper_and_of_an_agent_without_memory():
    maze = Maze()
    assert Beliefs(maze, "full").mean_return == pytest.approx(-6.84)
    assert Beliefs(maze, "partial").mean_return == pytest.approx(-7.24)
    policy = reactive_optimum(maze, "partial")
    assert reactive_return(maze, "partial", policy, max_moves=10_000) == pytest.approx(-12.6)
    # The limit of 100 moves ends a game in 100,000.
    assert reactive_return(maze, "partial", policy) == pytest.approx(-12.6, abs=1e-4)
    told = reactive_optimum(maze, "full")
    assert reactive_return(maze, "full", told) == pytest.approx(-6.84)


def policy_by_hand(p_left):
    """Towards the goal, and left with this probability where cells that need other moves look alike."""
    tokenizer = maze_texts(Maze(), "partial").tokenizer
    moves = {
        "There are walls to your left, above you, below you.": [0, 1, 0, 0],
        "There are walls above you, below you.": [p_left, 1 - p_left, 0, 0],
        "There is a wall above you.": [0, 0, 0, 1],
        "There are walls to your right, above you, below you.": [1, 0, 0, 0],
        "There are walls to your right, to your left.": [0, 0, 0, 1],
        "There are walls to your left, below you.": [0, 1, 0, 0],
        "There are walls to your right, below you.": [1, 0, 0, 0],
    }
    policy = torch.zeros(len(moves), 4, dtype=torch.float64)
    for text, chances in moves.items():
        policy[tokenizer.encode(text)[0]] = torch.tensor(chances, dtype=torch.float64)
    return policy


def test_a_coin_is_best_without_memory():
    maze = Maze()
    torch.testing.assert_close(reactive_optimum(maze, "partial"), policy_by_hand(0.5))
    returns = [reactive_return(maze, "partial", policy_by_hand(p)) for p in (0.3, 0.45, 0.5, 0.55, 0.7)]
    assert max(returns) == returns[2]
    assert returns[0] == pytest.approx(returns[4])  # the maze is its own mirror image


def test_returns_without_memory_are_those_of_games_worked_by_hand():
    """Two cells and the goal; right with probability p, else into a wall; two moves, and a turn that fails."""
    maze, p = Maze("#####\n#..G#\n#####"), 0.25
    policy = torch.tensor([[0, p, 1 - p, 0]] * 2)
    q = 1 - p
    near_one, far_one = q * -2, -2  # with one move left
    near_two, far_two = q * (-1 + near_one), -1 + p * near_one + q * far_one
    assert reactive_return(maze, "full", policy, max_moves=2) == pytest.approx((near_two + far_two) / 2)
