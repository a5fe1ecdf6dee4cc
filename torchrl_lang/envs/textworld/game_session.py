"""The game of one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_lang._files import FileError
from torchrl_lang.envs.textworld.engine import Failed
from torchrl_lang.envs.textworld.game_files import REMEDY
from torchrl_lang.envs.textworld.text import SILENT, Template, clean_command, is_admissible, is_meta, refused

__all__ = ["GameSession"]


class GameSession:
    """The texts of one row's game, and its state after the last turn.

    The environment asks the engine about many rows at once, and passes its answers to :meth:`opened` and
    :meth:`replied`. The seed of an episode, modulo the number of ``games``, selects one.
    """

    def __init__(self, games: Sequence[str], template: Template) -> None:
        self.games, self.template = games, template
        self.game = 0
        """Number of the current game."""
        self.state: dict[str, Any] = {}
        """The engine's last state; empty before the first."""
        self.failed = False
        """Whether the engine failed in this game."""
        self._turn: tuple[dict[str, Any], str] = (self.state, "")

    @property
    def points(self) -> float:
        """Points of the last turn. (The engine's ``score`` is the total so far.)"""
        return float(self.state.get("score", 0) - self._turn[0].get("score", 0))

    @property
    def invalid(self) -> bool:
        """Whether the last command did nothing; known only if the engine returns admissible commands."""
        before = self._turn[0]
        return before is not self.state and not self.state["acted"]

    @property
    def was_admissible(self) -> bool:
        """Whether the last command was among the admissible ones, word by word."""
        before, command = self._turn
        return is_admissible(command, before.get("admissible_commands") or ())

    def choose(self, seed: int) -> str:
        """The file of the game that a seed selects."""
        self.game = seed % len(self.games)
        return self.games[self.game]

    def opened(self, answer: dict[str, Any] | Failed) -> str:
        """The opening text of a game that has begun."""
        if isinstance(answer, Failed):
            raise FileError(self.games[self.game], f"cannot be begun by the engine ({answer})", REMEDY)
        self.state, self.failed, self._turn = answer, False, (answer, "")
        return self.template.write("opening", answer)

    def command(self, text: str) -> str | None:
        """The command to send to the engine; None if there is nothing to send."""
        command = clean_command(text)
        return None if is_meta(command) else command

    def replied(
        self, command: str | None, answer: dict[str, Any] | Failed | None
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The reply, the points, whether the game has ended, whether the engine failed, and an empty info.

        Without a command the game does not change.
        """
        if isinstance(answer, Failed):
            self.failed, self._turn = True, (self.state, "")
            return SILENT.lower() if self.template.lower else SILENT, 0.0, False, True, {}
        before = self.state
        if command is None or answer is None:
            answer = {**before, "feedback": refused(before["feedback"]), "acted": False}
        self.state, self._turn = answer, (before, command or "")
        return self.template.write("reply", answer), self.points, answer["done"], False, {}
