"""The greatest mean returns in a maze, exact, with memory of the game and without, and the players that have them."""

from __future__ import annotations

from functools import cached_property

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.functional import one_hot, pad

from torchrl_lang._checks import Count, Unit, checked, have_shapes
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.maze.env import MOVES, STAY, Maze, Observation, maze_texts, read_turns
from torchrl_lang.schema import ACTION, AGENT_MASK, ATTENTION_MASK, TOKENS

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


# -- players -----------------------------------------------------------------------------------------------------------


class _MazePlayer(TensorDictModuleBase):
    """Writes one move a turn; subclasses choose it."""

    in_keys = [TOKENS, ATTENTION_MASK, AGENT_MASK]
    out_keys = [ACTION]

    def __init__(self, maze: Maze, observation: Observation) -> None:
        super().__init__()
        self._texts = maze_texts(maze, observation)

    def _moves(self, tokens: Tensor, real: Tensor, agent: Tensor) -> Tensor:
        """The number of the next move of each row, int64 ``[N]``, from rows ``[N, T]``."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the next move of each row, ``action`` int64 ``[*B, 2]``."""
        tokens = tensordict.get(TOKENS)
        rows = (tensordict.get(key).reshape(-1, tokens.shape[-1]).cpu() for key in self.in_keys)
        move = (self._moves(*rows) + self._texts.first_move).to(tokens.device).reshape(tokens.shape[:-1])
        end = torch.full_like(move, self._texts.tokenizer.control.end_of_action)
        return tensordict.set(ACTION, torch.stack([move, end], -1))


HABIT = (0.35, 0.25, 0.25, 0.15)
"""Probabilities of the moves of a player without skill."""


class OptimalPlayer(_MazePlayer):
    """Plays best with memory of the game, or with some probability a move of :data:`HABIT` instead.

    The habit is uneven so that with little skill the most frequent move is not the best one: greedy imitation fails.

    Args:
        maze: the maze.
        observation: what it is shown.
        skill: probability of the best move in each turn.
        seed: seed of its random generator.

    Examples:
        >>> from torchrl_lang.envs.maze import MazeEnv, OptimalPlayer
        >>> from torchrl_lang.evaluation import play_games
        >>> env = MazeEnv(batch_size=[25])
        >>> round(play_games(env, OptimalPlayer(env.maze, "partial"), games=25).returns.mean().item(), 2)
        -7.24
    """

    @checked
    def __init__(self, maze: Maze, observation: Observation, *, skill: Unit = 1.0, seed: int | None = None) -> None:
        super().__init__(maze, observation)
        self.skill, self.stream = skill, RandomStream(seed)
        beliefs = Beliefs(maze, observation)
        # What no game can be, such as a row that has ended, is a belief of its own, the last one.
        self._first, self._after = beliefs.first, pad(beliefs.after, (0, 0, 0, 0, 0, 1), value=len(beliefs.sets))
        self._best = pad(beliefs.move_totals.argmax(-1), (0, 1))

    def _moves(self, tokens: Tensor, real: Tensor, agent: Tensor) -> Tensor:
        turns = read_turns(self._texts, tokens, real, agent)
        belief = self._first[tokens[:, 1]]
        for turn in range(turns.move.shape[1]):
            later = self._after[belief, turns.move[:, turn], turns.text[:, turn]]
            belief = torch.where(turn < turns.number, later, belief)
        best = self._best[belief]
        if self.skill == 1:
            return best
        habit = _draw(torch.tensor(HABIT, dtype=torch.float64).expand(len(best), -1), self.stream)
        return torch.where(self.stream.uniform(tuple(best.shape)) < self.skill, best, habit)


class ReactivePlayer(_MazePlayer):
    """Sees the last text only, and draws a move from the probabilities of a table.

    Args:
        maze: the maze.
        observation: what it is shown.
        policy: float ``[X, 4]``, the probabilities of the moves for each text, such as those of
            :func:`~torchrl_lang.envs.maze.reactive_optimum`; by default all are equal.
        seed: seed of its random generator.

    Raises:
        ValueError: ``policy`` has another shape.

    Examples:
        >>> from torchrl_lang.envs.maze import MazeEnv, ReactivePlayer
        >>> env = MazeEnv(batch_size=[4], seed=0)
        >>> env.rollout(3, ReactivePlayer(env.maze, "partial", seed=0))["action"].shape
        torch.Size([4, 3, 2])
    """

    def __init__(
        self, maze: Maze, observation: Observation, policy: Tensor | None = None, *, seed: int | None = None
    ) -> None:
        super().__init__(maze, observation)
        texts = int(self._texts.shown.max())  # the last one is success
        policy = torch.full((texts, len(MOVES)), 1 / len(MOVES)) if policy is None else policy
        have_shapes(("policy", policy, (texts, len(MOVES))))
        self.policy, self.stream = policy.double(), RandomStream(seed)

    def _moves(self, tokens: Tensor, real: Tensor, agent: Tensor) -> Tensor:
        text = tokens.gather(-1, (real.sum(-1, keepdim=True) - 2).clamp_min(0))[:, 0]
        # Rows that have ended stop at a control token, and their moves are ignored.
        return _draw(self.policy[torch.where(text < len(self.policy), text, 0)], self.stream)


def _draw(policy: Tensor, stream: RandomStream) -> Tensor:
    """A move of each row of probabilities ``[N, 4]``, int64 ``[N]``."""
    return (policy.cumsum(-1) <= stream.uniform((len(policy), 1))).sum(-1).clamp_max(len(MOVES) - 1)
