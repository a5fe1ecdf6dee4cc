"""An episode as text: who said what, and what it earned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_lang.storage.errors import shorten

__all__ = ["LARGEST_REWARD", "Episode", "Turn"]

LARGEST_REWARD: float = torch.finfo(torch.float32).max
"""Rewards of rows are float32."""


@dataclass(frozen=True)
class Turn:
    """What one side says before the other's turn.

    Args:
        text: plain text; a control token's name in it is text like any other.
        reward: None for the environment's words, the reward of the turn for the agent's.
        closed: the agent itself wrote the end of its turn. False where it did not and the environment did.
        tokens: the exact ids, where the text alone would be encoded otherwise (a model may spell a word in pieces that
            no tokenizer would choose, or write control tokens).

    Raises:
        ValueError: the reward is not a finite number, or a turn of the environment claims not to be closed.

    Examples:
        >>> from torchrl_lang.data import Turn
        >>> Turn("is it red?", reward=-1.0)
        Turn(text='is it red?', reward=-1.0, closed=True, tokens=None)
    """

    text: str
    reward: float | None = None
    closed: bool = True
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and not abs(self.reward) <= LARGEST_REWARD:
            raise ValueError(
                f"The reward of a turn must be a finite float32, got {self.reward} for {shorten(self.text)}."
            )
        if self.reward is None and not self.closed:
            raise ValueError(
                f"closed=False is for turns of the agent, which have a reward; {shorten(self.text)} has none."
            )

    @property
    def by_agent(self) -> bool:
        """The agent wrote this turn."""
        return self.reward is not None


@dataclass(frozen=True)
class Episode:
    """Turns in order, and how the episode ended.

    Args:
        turns: may be empty; a side may speak several times in a row.
        terminated: the task ended.
        truncated: a limit did: of turns, or of the row.
        cut: the last turn was cut short by the end of the row, so that nothing closes it. Only where ``truncated``.

    Examples:
        >>> from torchrl_lang.data import Episode, Turn
        >>> episode = Episode([Turn("a dog"), Turn("is it red?", -1.0), Turn("no")], terminated=True)
        >>> episode.total_reward
        -1.0
    """

    turns: Sequence[Turn]
    terminated: bool
    truncated: bool = False
    cut: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(self.turns))
        if self.cut and not (self.truncated and self.turns):
            raise ValueError("cut=True is for an episode whose last turn did not fit: it has turns and is truncated.")

    @property
    def total_reward(self) -> float:
        """Sum of the rewards of the turns."""
        return sum((turn.reward for turn in self.turns if turn.reward is not None), 0.0)
