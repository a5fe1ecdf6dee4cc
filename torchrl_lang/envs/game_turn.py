"""The protocol of plain-Python games, and what they return: turns, and features beside their texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchrl_lang._files import shorten
from torchrl_lang.schema import FEATURES, FEATURES_MASK
from torchrl_lang.text.episodes import LARGEST_REWARD


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
        >>> from torchrl_lang.envs.game_turn import ToolText
        >>> ToolText("42") == "42"
        True
    """


def without_thoughts(text: str) -> str:
    """An utterance without the thoughts of a reasoning model: what follows the last ``</think>``.

    A thought without an end is no answer, so nothing of it is left. For ``TextGameEnv(read=without_thoughts)``.

    Examples:
        >>> from torchrl_lang.envs.game_turn import without_thoughts
        >>> without_thoughts("<think>north?</think> go north"), without_thoughts("go <think>nor")
        ('go north', 'go')
    """
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


class GameTurn(NamedTuple):
    """The result of a turn of a game."""

    text: str
    reward: float
    terminated: bool
    truncated: bool = False


class GamePlace(NamedTuple):
    """Row, seed and turn of a game, and how its results are read; errors name the place."""

    row: int
    seed: int
    turn: int
    """Number of the turn, from 1; 0 for the opening."""

    def __str__(self) -> str:
        return f"Game {self.row} of the batch (seed {self.seed}, turn {self.turn})"

    def read_opening(self, returned: Any) -> str:
        """Read the opening text from the result of a game's ``reset``: a text, or a text and an info."""
        match returned:
            case str(text) | (str(text), _):
                return text
        raise TypeError(f"{self} returned {shorten(returned)} from reset, expected a text, or (text, info).")

    def read_turn(self, returned: Any) -> GameTurn:
        """Read the result of a game's ``step``: three values, or five as in Gymnasium.

        Raises:
            TypeError: the values have other types, or the reward is not a finite number in float32.
        """
        match returned:
            case (str(text), reward, terminated):
                truncated: Any = False
            case (str(text), reward, terminated, truncated, _):
                pass
            case _:
                expected = "(text, reward, terminated) or (text, reward, terminated, truncated, info)"
                raise TypeError(f"{self} returned {shorten(returned)} from step, expected {expected}.")
        values = {}
        for name, given in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            is_reward = name == "reward"
            expected, limit = ("a finite number in float32", LARGEST_REWARD) if is_reward else ("True or False", 1)
            try:
                values[name] = float(given if not isinstance(given, str | bytes) else math.nan)
                good = abs(values[name]) <= limit and (is_reward or values[name] in (0, 1))
            except (TypeError, ValueError, OverflowError, RuntimeError):
                good = False
            if not good:  # bool("False") is True, and NaN compares with nothing
                raise TypeError(f"{self} returned {shorten(given)} as its {name}, expected {expected}.")
        return GameTurn(text, values["reward"], bool(values["terminated"]), bool(values["truncated"]))

    def read_features(self, given: Any, size: tuple[int, int]) -> Tensor:
        """The features of a game, float32 ``[n, F]`` with ``n`` up to ``P``, on the CPU."""
        features = torch.as_tensor(given, dtype=torch.float32, device="cpu").detach()
        (most, width), shape = size, tuple(features.shape)
        if not features.numel():  # a game may show none
            return torch.zeros(0, width)
        finite = bool(features.isfinite().all())
        if not finite or len(shape) != 2 or shape[0] > most or shape[1] != width:
            found = f"{self} shows features of shape {shape}" + ", not all of them finite" * (not finite)
            raise ValueError(f"{found}, expected up to {most} vectors of {width} numbers.")
        return features


def padded_features(shown: Mapping[int, Tensor], n: int, size: tuple[int, int]) -> dict[str, Tensor]:
    """The features of ``n`` rows, padded with zeros, and their mask, on the CPU; of rows without any, zeros."""
    padded, mask = torch.zeros(n, *size), torch.zeros(n, size[0], dtype=torch.bool)
    for row, features in shown.items():
        padded[row, : len(features)], mask[row, : len(features)] = features, True
    return {FEATURES: padded, FEATURES_MASK: mask}
