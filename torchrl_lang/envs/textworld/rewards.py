"""What a turn of a TextWorld game earns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrl_lang.envs.textworld.text import is_admissible

__all__ = ["TextWorldRewards"]


@dataclass(frozen=True)
class TextWorldRewards:
    """Weights of what a turn earns. By default it is what the game gives: the points that the score goes up by.

    The environment pays this by itself. Transforms add the same kinds of rewards on top of it, one by one and for any
    language environment: :class:`~torchrl_lang.transforms.LivingCost`, :class:`~torchrl_lang.transforms.WinReward` and
    their like. Give a weight here or a transform there, or both are paid.

    Args:
        score: for each point that the score goes up. (The engine's own second value is the score so far.)
        win: once, for winning.
        loss: once, for losing; a penalty is negative.
        living: for every turn.
        invalid: for a turn in which nothing was done: the command is not understood, impossible, or asks the engine
            instead of the game. Looking and examining is something.
        admissible: for a command that is among the admissible ones, word by word.

    Examples:
        >>> from torchrl_lang.envs.textworld import TextWorldRewards
        >>> rewards = TextWorldRewards(win=10, living=-0.1)
        >>> before = {"score": 2, "moves": 4, "won": False, "lost": False}
        >>> rewards.of_turn(before, {"score": 3, "moves": 5, "won": True, "lost": False}, "open box")
        10.9
    """

    score: float = 1.0
    win: float = 0.0
    loss: float = 0.0
    living: float = 0.0
    invalid: float = 0.0
    admissible: float = 0.0

    @property
    def infos(self) -> set[str]:
        """The engine's infos that these rewards take: without the admissible commands it counts every turn a move."""
        return {"admissible_commands"} if self.invalid or self.admissible else set()

    def of_turn(self, before: Mapping[str, Any], after: Mapping[str, Any], command: str) -> float:
        """The reward of the command that led from one state of the engine to another."""
        reward = self.living + self.score * (after["score"] - before["score"])
        reward += self.win * (after["won"] and not before["won"]) + self.loss * (after["lost"] and not before["lost"])
        if self.invalid:
            reward += self.invalid * (after["moves"] == before["moves"])
        if self.admissible:
            reward += self.admissible * is_admissible(command, before["admissible_commands"])
        return float(reward)
