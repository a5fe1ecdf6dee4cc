"""Episodes as text: the turns of both sides and their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrl_lang._checks import one_of
from torchrl_lang._files import shorten

__all__ = ["LARGEST_REWARD", "ROLES", "Episode", "Turn"]

ROLES = ("user", "tool", "system")
"""Roles of the messages that the environment writes in a chat."""

LARGEST_REWARD: float = torch.finfo(torch.float32).max
"""The largest reward, because rows store float32."""


@dataclass(frozen=True)
class Turn:
    """One turn of the agent or the environment.

    Args:
        text: plain text; names of control tokens in it are not special.
        reward: the reward of the agent's turn; None for a turn of the environment.
        closed: False if the agent did not write the end token of its turn and the environment added it.
        tokens: the exact ids, if encoding ``text`` would give others (a model may generate a word in unusual pieces, or
            control tokens).
        role: of a message that the environment writes in a chat: "user", "tool", or "system" for the first one.

    Raises:
        ValueError: the reward is not a finite number, a turn of the environment has ``closed=False``, a turn of the
            agent has a role, or there is no such role.

    Examples:
        >>> from torchrl_lang.text import Turn
        >>> Turn("is it red?", reward=-1.0)
        Turn(text='is it red?', reward=-1.0, closed=True, tokens=None, role='user')
    """

    text: str
    reward: float | None = None
    closed: bool = True
    tokens: tuple[int, ...] | None = None
    role: str = "user"

    def __post_init__(self) -> None:
        if self.reward is not None and not abs(self.reward) <= LARGEST_REWARD:
            raise ValueError(
                f"The reward of a turn must be a finite float32, got {self.reward} for {shorten(self.text)}."
            )
        if self.reward is None and not self.closed:
            raise ValueError(
                f"closed=False is for turns of the agent, which have a reward; {shorten(self.text)} has no reward."
            )
        one_of("role", self.role, ROLES if self.reward is None else ("user",))

    @property
    def by_agent(self) -> bool:
        """Whether the agent wrote this turn."""
        return self.reward is not None


@dataclass(frozen=True)
class Episode:
    """The turns of an episode and how it ended.

    Args:
        turns: may be empty; a side may take several turns in a row.
        terminated: the task ended.
        truncated: a limit (of turns or of the row) ended the episode.
        cut: the end of the row cut the last turn, which has no end token. Only with ``truncated``.

    Examples:
        >>> from torchrl_lang.text import Episode, Turn
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
            raise ValueError("cut=True means that the last turn did not fit: it needs turns and truncated=True.")

    @property
    def total_reward(self) -> float:
        """Sum of the rewards of all turns."""
        return sum((turn.reward for turn in self.turns if turn.reward is not None), 0.0)
