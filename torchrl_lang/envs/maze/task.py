"""The maze of LMRL-Gym as a task of the recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang.envs.maze.env import Maze, MazeEnv, Observation, maze_texts
from torchrl_lang.envs.maze.optimum import Beliefs, OptimalPlayer, ReactivePlayer, reactive_optimum
from torchrl_lang.evaluation import GameRecords, KnownValues, Summary, summarize
from torchrl_lang.evaluation.metrics import lmrl_gym_score
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.maze import PRESETS, MazeData, MazePlay
from torchrl_lang.schema import TOKENS
from torchrl_lang.text import Tokenizer

_ANCHORS: dict[Observation, dict[str, float]] = {
    "full": {"worst": -101.0, "data": -83.0, "best": -6.84},
    "partial": {"worst": -101.0, "data": -83.0, "best": -25.75},  # better ones are possible: the optimum has 116.2
}
"""The returns that LMRL-Gym's scores of its mazes have as 0, 50 and 100."""


def normalized_return(mean_return: float, observation: Observation) -> float:
    """Score a return in LMRL-Gym's maze, see :func:`~torchrl_lang.evaluation.metrics.lmrl_gym_score`.

    Examples:
        >>> from torchrl_lang.envs.maze.task import normalized_return
        >>> normalized_return(-92.0, "full"), normalized_return(-6.84, "full"), normalized_return(-25.75, "partial")
        (25.0, 100.0, 100.0)
    """
    return lmrl_gym_score(mean_return, **_ANCHORS[observation])


@dataclass(frozen=True)
class MazeTask(Task):
    """Find the goal of LMRL-Gym's maze; see :class:`~torchrl_lang.envs.maze.MazeEnv`.

    A game that counts as won reached the goal. The games are the 25 starts.

    Args:
        observation: ``"partial"``, the walls around the agent; ``"full"``, also the goal's position and its own.
        max_moves: moves in which the goal can be reached.
    """

    name: ClassVar[str] = "maze"
    data_options = MazeData
    play_options = MazePlay
    presets = PRESETS
    baselines = ("random", "memoryless", "optimal")
    turns_name = "moves"
    metric_meanings: ClassVar[Mapping[str, str]] = {
        "regret": "the greatest mean return that a player with memory can have, minus this one",
        "normalized": "return on LMRL-Gym's scale: 0: -101, 50: -83, 100: -6.84 or, partially observed, -25.75",
    }
    action_length = 2  # a move and the end of the action

    observation: Observation = "partial"
    max_moves: int = 100

    def __post_init__(self) -> None:
        check_options(observation=(self.observation, tuple(_ANCHORS)), max_moves=(self.max_moves, 1))

    @property
    def optimum(self) -> float:
        """The greatest mean return, exact: -7.24, fully observed -6.84."""
        return Beliefs(Maze(), self.observation).mean_return

    def tokenizer(self) -> Tokenizer:
        """One symbol for each text."""
        return maze_texts(Maze(), self.observation).tokenizer

    def env(self, batch_size: int, **options: Any) -> MazeEnv:
        """See :meth:`Task.env`."""
        return MazeEnv(observation=self.observation, max_moves=self.max_moves, batch_size=[batch_size], **options)

    def player(self, name: str, seed: int | None = None) -> Player:
        """A scripted player.

        random: any move. optimal: the best one with memory. memoryless: the best one that sees the last text only.
        """
        game = Maze(), self.observation
        players = {
            "random": lambda: Player(ReactivePlayer(*game, seed=seed)),
            "memoryless": lambda: Player(ReactivePlayer(*game, reactive_optimum(*game), seed=seed)),
            "optimal": lambda: Player(OptimalPlayer(*game), is_random=False),
        }
        return named_player(name, players)()

    def behavior_policy(self, options: MazeData) -> Player:
        """The scripted player."""
        if options.player != "mediocre":
            return self.player(options.player, options.seed)
        return Player(OptimalPlayer(Maze(), self.observation, skill=options.skill, seed=options.seed))

    def number_of_games(self, split: str | None) -> int:
        """One for each start."""
        return len(Maze().starts)

    def known_values(self, rows: TensorDictBase) -> list[KnownValues]:
        """The moves after each first text, followed by best play with memory."""
        maze, states = Maze(), []
        beliefs, first_move = Beliefs(maze, self.observation), maze_texts(maze, self.observation).first_move
        moves = torch.arange(beliefs.move_totals.shape[-1])[:, None] + first_move
        for begin in rows.get(TOKENS)[:, :3].long().unique(dim=0):  # a text between two control tokens
            belief = int(beliefs.first[begin[1]])
            states.append(KnownValues(begin, moves, beliefs.move_totals[belief] / len(beliefs.sets[belief])))
        return states

    def won(self, records: GameRecords) -> Tensor:
        """Games that reached the goal, bool ``[N]``."""
        return records.terminated

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of games, with their regret and their score."""
        found = summarize(records, name=name, won=self.won)
        score = normalized_return(found.mean_return, self.observation)
        return replace(found, metrics={"regret": self.optimum - found.mean_return, "normalized": score})
