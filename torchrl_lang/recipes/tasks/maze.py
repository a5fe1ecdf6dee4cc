"""Options and presets of the maze."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torchrl_lang.recipes.options import DataOptions, PlayOptions, option, with_defaults
from torchrl_lang.recipes.tasks import GamesOptions

PRESETS: dict[str, dict[str, Any]] = {
    # The data are for imitating who made them; a model that is chosen by its return has hardly learned.
    "bc": {"layers": 2, "width": 64, "heads": 4, "batch_size": 16, "steps": 60, "eval_every": 60, "eval_games": 25},
    "ppo": {
        "iterations": 100,
        "games": 128,
        "turns": 12,
        "epochs": 4,
        "lr": 1e-3,
        "value_warmup": 8,
        # The optimum is about 10 nats a game from the data.
        "kl_coef": 0.0,
        "kl_target": None,
        # Without it a policy that has become certain of a move into a wall never leaves it.
        "entropy_weight": 0.01,
        "eval_every": 25,
        "eval_games": 100,
    },
}


@dataclass(frozen=True, kw_only=True)
class MazeGames(GamesOptions, of_task="maze"):
    """Options that define the games."""

    observation: Literal["partial", "full"] = option(
        "partial", "what the agent is shown: the walls around it, or also the goal's position and its own"
    )
    max_moves: int = option(100, "moves in which the goal can be reached", ge=1)


@with_defaults(games=1000)
class MazeData(MazeGames, DataOptions):
    """Generate a dataset of a scripted player in a maze."""

    player: Literal["mediocre", "random", "optimal", "memoryless"] = option(
        "mediocre", "who plays; mediocre: --skill of its moves are the best ones, the others drawn unevenly"
    )
    skill: float = option(0.09, "share of best moves of the mediocre player", ge=0, le=1)

    def notes(self) -> dict[str, Any]:
        """Settings of the games beside the task."""
        return {"player": self.player, "skill": self.skill, **super().notes()}


@dataclass(frozen=True, kw_only=True)
class MazePlay(MazeGames, PlayOptions):
    """Look for the goal of a maze yourself, or watch a policy."""
