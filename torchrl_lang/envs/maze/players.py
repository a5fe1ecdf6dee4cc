"""Scripted policies in a maze: the best with memory, one that sees the last text only, and mixtures with chance."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.functional import pad

from torchrl_lang._checks import Unit, checked, have_shapes
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.maze.env import maze_texts, read_turns
from torchrl_lang.envs.maze.grid import MOVES, Maze, Observation
from torchrl_lang.envs.maze.optimum import Beliefs
from torchrl_lang.schema import ACTION, AGENT_MASK, ATTENTION_MASK, TOKENS


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
