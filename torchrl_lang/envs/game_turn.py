"""The protocol of plain-Python games, and checks of what they return."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torchrl_lang._files import shorten
from torchrl_lang.text.episodes import LARGEST_REWARD

__all__ = ["GamePlace", "GameTurn", "TextGame", "ToolText", "read_opening", "read_turn", "without_thoughts"]


@runtime_checkable
class TextGame(Protocol):
    """A game for one player. All randomness must come from the seed, so that the same seed begins the same game.

    In an environment with ``features`` a game also has an attribute ``features`` after ``reset``, see
    :class:`~torchrl_lang.envs.TextGameEnv`.
    """

    def reset(self, seed: int) -> str | tuple[str, Any]:
        """Begin a game. Returns its opening text (empty if the player has the first turn), or the text and an info."""

    def step(self, text: str) -> tuple[str, float, bool] | tuple[str, float, bool, bool, Any]:
        """Play a turn.

        Returns:
            The reply (may be empty), the reward of this turn, and whether the task has terminated; or, as in Gymnasium,
            the reply, the reward, ``terminated``, ``truncated`` (a limit of the game ended it) and an info. Infos are
            ignored.
        """


class ToolText(str):
    """A game's reply that is a message of a tool in the rows of a chat, if the chat template has such messages.

    Examples:
        >>> from torchrl_lang.envs import ToolText
        >>> ToolText("42") == "42"
        True
    """


def without_thoughts(text: str, *, begin: str = "<think>", end: str = "</think>") -> str:
    """An utterance without the thoughts of a reasoning model: what follows the last ``end``.

    A thought without an end is no answer, so nothing of it is left. For ``TextGameEnv(read=without_thoughts)``.

    Examples:
        >>> from torchrl_lang.envs import without_thoughts
        >>> without_thoughts("<think>north?</think> go north"), without_thoughts("go <think>nor")
        ('go north', 'go')
    """
    if end in text:
        text = text.rpartition(end)[2]
    return text.partition(begin)[0].strip()


class GamePlace(NamedTuple):
    """Row, seed and turn of a game, for error messages."""

    row: int
    seed: int
    turn: int
    """Number of the turn, from 1; 0 for the opening."""

    def __str__(self) -> str:
        return f"Game {self.row} of the batch (seed {self.seed}, turn {self.turn})"


class GameTurn(NamedTuple):
    """The result of a turn of a game."""

    text: str
    reward: float
    terminated: bool
    truncated: bool = False


def read_opening(returned: Any, place: GamePlace) -> str:
    """Read the opening text from the result of a game's ``reset``.

    Raises:
        TypeError: the result is neither a text nor a text and an info.
    """
    text = returned[0] if type(returned) is tuple and len(returned) == 2 else returned
    if not isinstance(text, str):
        raise TypeError(
            f"{place} returned {shorten(returned)} from reset, expected its opening text, or (text, info): return a "
            f"string, empty if the player has the first turn."
        )
    return text


def read_turn(returned: Any, place: GamePlace) -> GameTurn:
    """Read the result of a game's ``step``: three values, or five as in Gymnasium.

    Raises:
        TypeError: the values have other types.
        ValueError: the reward is not a finite number in float32.
    """
    if not isinstance(returned, tuple) or len(returned) not in (3, 5):
        many = f"{len(returned)} values" if isinstance(returned, tuple) else "no tuple"
        raise TypeError(
            f"{place} returned {shorten(returned)} from step, {many}, expected (text, reward, terminated) or "
            f"(text, reward, terminated, truncated, info)."
        )
    text = returned[0]
    if not isinstance(text, str):
        raise TypeError(f"{place} returned {shorten(text)} as its reply, expected a string, which may be empty.")
    truncated = _flag(returned[3], "truncated", place) if len(returned) == 5 else False
    return GameTurn(text, _reward(returned[1], place), _flag(returned[2], "terminated", place), truncated)


def _reward(value: Any, place: GamePlace) -> float:
    try:
        reward = float(value) if not isinstance(value, str | bytes) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        reward = None
    if reward is None:
        raise TypeError(f"{place} returned {shorten(value)} as its reward, expected one number.")
    if not abs(reward) <= LARGEST_REWARD:  # also True for NaN
        kind = "not a number" if math.isnan(reward) else "not finite in float32"
        raise ValueError(
            f"{place} returned the reward {shorten(value)}, which is {kind} and would make losses NaN: "
            f"return a finite number."
        )
    return reward


def _flag(value: Any, name: str, place: GamePlace) -> bool:
    if value is True or value is False:
        return value
    # bool("False") is True, so accept only values equal to 0 or 1 (including NumPy booleans and 1-element tensors).
    try:
        if not isinstance(value, str | bytes) and value is not None and float(value) in (0.0, 1.0):
            return bool(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{place} returned {shorten(value)} as '{name}', expected True or False.")
