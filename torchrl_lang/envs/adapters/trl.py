"""Text games as environments of TRL's ``GRPOTrainer``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torchrl_lang.envs.game_turn import GamePlace, TextGame

_FINISHED = "The game is over."
"""The result of the tool when a game ends, and of calls after that."""


def trl_environment(
    make_game: Callable[[], TextGame],
    *,
    method: str = "play",
    doc: str = "Take a turn in the game.",
    argument_doc: str = "what to write",
    max_turns: int | None = None,
) -> type:
    """A class for ``GRPOTrainer(environment_factory=...)``; each of its objects plays one game at a time.

    TRL calls ``reset`` with the columns of a prompt's row and appends the opening to the prompt. The model calls the
    method ``method(text)`` as a tool, once per turn. ``get_reward()`` and the attribute ``reward`` are the sum of the
    rewards since the last reset. All completions of a prompt play the game of the row's ``seed``, an integer.

    TRL turns errors of a game into results of the tool, which the model reads; ``check_language_env`` finds them first.

    Args:
        make_game: makes a game; for an environment such as Wordle ``lambda: EnvGame(WordleEnv(batch_size=[1]))``.
        method: name of the method, which the model reads as the tool's name.
        doc: what the method does, for the model.
        argument_doc: what its argument ``text`` is, for the model.
        max_turns: calls after which a game ends.

    Raises:
        ValueError: ``method`` is no name for a public method.
        KeyError: on ``reset``, the row has no seed.

    Examples:
        >>> from torchrl_lang.envs import trl_environment
        >>> from torchrl_lang.envs.adapters.tools import QuestionGame
        >>> Sums = trl_environment(lambda: QuestionGame([("2 + 2 =", "4")]), method="answer", doc="Answer.")
        >>> env = Sums()
        >>> env.reset(prompt=[{"role": "user", "content": "Add. "}], seed=0)
        '2 + 2 ='
        >>> env.answer(text="4"), env.get_reward()
        ('The game is over.', 1.0)
    """
    if not method.isidentifier() or method.startswith("_") or method in ("reset", "get_reward", "reward"):
        raise ValueError(f"method is the name of a public method other than reset and get_reward, got {method!r}.")

    class TextGameEnvironment:  # TRL offers every public method except reset and get_reward as a tool
        def __init__(self) -> None:
            self._game, self._place, self._over, self.reward = make_game(), GamePlace(0, 0, 0), True, 0.0

        def reset(self, **row: Any) -> str | None:
            """Begin the game of a row's seed; returns its opening, or None if the player has the first turn."""
            self._place, self._over, self.reward = GamePlace(0, operator.index(row["seed"]), 0), False, 0.0
            return self._place.read_opening(self._game.reset(self._place.seed)) or None

        def get_reward(self) -> float:
            """The sum of the rewards since the last reset."""
            return self.reward

        def _tool(self, text: str) -> str:
            if self._over:
                return _FINISHED
            self._place = self._place._replace(turn=self._place.turn + 1)
            turn = self._place.read_turn(self._game.step(text))
            self.reward += turn.reward
            self._over = turn.terminated or turn.truncated or self._place.turn == max_turns
            return "\n".join(filter(None, (turn.text, _FINISHED if self._over else "")))

    tool = TextGameEnvironment._tool
    tool.__name__, tool.__qualname__ = method, f"TextGameEnvironment.{method}"
    tool.__doc__ = f"{doc}\n\nArgs:\n    text: {argument_doc}\n"
    setattr(TextGameEnvironment, method, tool)
    return TextGameEnvironment
