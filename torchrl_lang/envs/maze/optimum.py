"""The greatest mean returns in a maze, exact: knowing the cell, with memory of the game, and without memory."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from torchrl_lang._checks import Count, checked, have_shapes
from torchrl_lang.envs.maze.env import maze_texts
from torchrl_lang.envs.maze.grid import MOVES, STAY, Maze, Observation

_POLICIES, _STEPS, _RATE = 8, 500, 0.1
"""Of the search for the best policy without memory; with a rate of 0.5 it does not settle in the maze of LMRL-Gym."""


class Beliefs:
    """The sets of cells in which an agent can be, given all that it has seen and done; all of them that can occur.

    Moves and texts are certain, so a game either rules a start out or leaves it as likely as before. The belief is
    therefore the set of the cells to which the starts that fit the game lead, and it is all that an agent with memory
    needs to know (Kaelbling et al. 1998, "Planning and acting in partially observable stochastic domains"). Shown its
    position, the agent has beliefs of one cell, the states of the maze.

    Args:
        maze: the maze.
        observation: what the agent is shown.

    Examples:
        >>> from torchrl_lang.envs.maze import Beliefs, Maze
        >>> round(Beliefs(Maze(), "partial").mean_return, 2), round(Beliefs(Maze(), "full").mean_return, 2)
        (-7.24, -6.84)
    """

    sets: list[frozenset[int]]
    """The cells of each belief, ``B`` of them."""
    first: Tensor
    """int64 ``[V]``, the belief after a first text, by its token; ``B`` where no game begins so."""
    after: Tensor
    """int64 ``[B, 5, V]``, the belief after a move, or what is none, and a reply's token; ``B`` if impossible."""

    def __init__(self, maze: Maze, observation: Observation) -> None:
        tokenizer, shown, _ = maze_texts(maze, observation)
        self._goal, self._following = maze.goal, maze.following
        text, following = shown.tolist(), maze.following.tolist()

        def split(cells: list[int]) -> dict[int, frozenset[int]]:
            away = [cell for cell in cells if cell != maze.goal]
            return {seen: frozenset(cell for cell in away if text[cell] == seen) for seen in {text[c] for c in away}}

        begins = split(maze.starts.tolist())
        number = {belief: index for index, belief in enumerate(begins.values())}
        self.sets = [*number]
        leads = []
        for here, belief in enumerate(self.sets):  # they grow meanwhile
            for move in range(STAY + 1):
                for seen, moved in split([following[cell][move] for cell in belief]).items():
                    if moved not in number:
                        number[moved] = len(number)
                        self.sets.append(moved)
                    leads.append((here, move, seen, number[moved]))
        none = len(self.sets)
        self.first = torch.full((tokenizer.vocab_size,), none)
        self.first[[*begins]] = torch.tensor([number[belief] for belief in begins.values()])
        self.after = torch.full((none, STAY + 1, tokenizer.vocab_size), none)
        here, move, seen, moved = torch.tensor(leads).T
        self.after[here, move, seen] = moved

    @cached_property
    def move_totals(self) -> Tensor:
        """The sum over the cells of each belief of the return after a move, then best play, float64 ``[B, 4]``.

        Value iteration from zero; it ends at the exact values, because they are whole numbers.
        """
        arrives = self._following[:, : len(MOVES)] == self._goal
        misses = torch.stack([(~arrives[sorted(belief)]).sum(0) for belief in self.sets]).double()
        best = torch.zeros(len(self.sets) + 1, dtype=torch.float64)  # the last one: no such game
        while True:
            totals = best[self.after[:, : len(MOVES)]].sum(-1) - misses
            if torch.equal(totals.amax(-1), best[:-1]):
                return totals
            best[:-1] = totals.amax(-1)

    @property
    def mean_return(self) -> float:
        """The greatest mean return over all starts, if no limit of moves ends its games."""
        begins = self.first[self.first < len(self.sets)]
        starts = sum(len(self.sets[belief]) for belief in begins.tolist())
        return float(self.move_totals.amax(-1)[begins].sum()) / starts


@checked
def reactive_return(maze: Maze, observation: Observation, policy: Tensor, *, max_moves: Count = 100) -> float:
    r"""The mean return over all starts of a policy that sees the last text only, exact.

    Args:
        maze: the maze.
        observation: what the agent is shown.
        policy: float ``[X, 4]``, the probabilities of the moves for each text, in the order of its token.
        max_moves: of the environment.

    Raises:
        ValueError: ``policy`` has another shape, or ``max_moves`` is below 1.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.maze import Maze, reactive_return
        >>> reactive_return(Maze("####\n#.G#\n####"), "full", torch.tensor([[0.0, 0.5, 0.5, 0.0]]), max_moves=2)
        -1.0
    """
    shown, following = _away_from_goal(maze, observation)
    have_shapes(("policy", policy, (int(shown.max()) + 1, len(MOVES))))
    chance = policy.double()[shown]  # [S, 4]
    value = torch.full((len(shown) + 1,), -1.0, dtype=torch.float64)  # of the turn after the last move; then the goal
    value[-1] = 1.0  # undoes the reward of the move that arrives
    for _ in range(max_moves):
        value[:-1] = (chance * (value[following] - 1)).sum(-1)
    return float(value[:-1].mean())


def reactive_optimum(maze: Maze, observation: Observation, *, seed: int = 0) -> Tensor:
    """The best policy that sees the last text only; it may toss coins. float64 ``[X, 4]``.

    Such an agent needs chance (Singh et al. 1994, "Learning without state-estimation in partially observable Markovian
    decision processes"), and its best policy solves no Bellman equation. This is mirror ascent on the exact mean return
    from random policies, ``pi <- pi exp(rate Q)`` normalised, with ``Q`` the mean action value over the visits to the
    cells of a text. The best policy found is returned, a local optimum. Games have no limit of moves.

    Args:
        maze: the maze.
        observation: what the agent is shown.
        seed: seed of the random policies.

    Examples:
        >>> from torchrl_lang.envs.maze import Maze, reactive_optimum, reactive_return
        >>> maze = Maze()
        >>> policy = reactive_optimum(maze, "partial")
        >>> round(reactive_return(maze, "partial", policy), 2)
        -12.6
        >>> [round(chance, 2) for chance in policy[1].tolist()]  # between walls above and below: left or right
        [0.5, 0.5, 0.0, 0.0]
    """
    shown, following = _away_from_goal(maze, observation)
    size, kinds = len(shown), int(shown.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(_POLICIES, kinds, len(MOVES), generator=generator, dtype=torch.float64)
    leads = one_hot(following, size + 1)[..., :size].double()  # [S, 4, S]
    of_text = one_hot(shown, kinds).double()  # [S, X]
    reward = -(following < size).double()  # [S, 4]
    for _ in range(_STEPS):
        chance = logits.softmax(-1)[:, shown]  # [K, S, 4]
        stays = torch.eye(size, dtype=torch.float64) - torch.einsum("ksa,sat->kst", chance, leads)
        value = torch.linalg.solve(stays, (chance * reward).sum(-1))
        visits = torch.linalg.solve(stays.mT, torch.full_like(value, 1 / size))
        action_value = reward + torch.einsum("sat,kt->ksa", leads, value)
        total = torch.einsum("sx,ks,ksa->kxa", of_text, visits, action_value)
        mean = total / (visits @ of_text)[..., None]  # over the visits to the cells of each text
        # Moves of poor policies differ much: at the bound a logit changes by 1.
        logits = (logits + _RATE * (mean - mean.amax(-1, keepdim=True)).clamp_min(-1 / _RATE)).log_softmax(-1)
    return logits[value.mean(-1).argmax()].exp()


def _away_from_goal(maze: Maze, observation: Observation) -> tuple[Tensor, Tensor]:
    """Text of each start, int64 ``[S]``, and the start after each move, int64 ``[S, 4]``: ``S`` is the goal."""
    number = torch.full((len(maze.cells),), len(maze.starts))
    number[maze.starts] = torch.arange(len(maze.starts))
    following = number[maze.following[maze.starts, : len(MOVES)]]
    return maze_texts(maze, observation).shown[maze.starts], following
