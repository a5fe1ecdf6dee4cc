"""Tools beside a text game, and a game of questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchrl_lang.envs.adapters.tools import Tools
from torchrl_lang.envs.game_turn import TextGame, ToolText

__all__ = ["QuestionGame", "ToolGame"]


class ToolGame:
    """A text game whose player may call tools before it plays: each call is a turn, and its result is the reply.

    In the rows of a chat the reply is a message of a tool, where the chat template has such messages.

    An utterance that calls no tool goes to the game. Unknown tools, wrong arguments and errors that a tool raises are
    replies, too. Games must depend on their seed only, so tools must not draw random numbers.

    Args:
        game: the game; functions that read its state can be its own methods, ``ToolGame(game, [game.look])``.
        tools: a :class:`Tools`, or the functions.
        introduction: written before the game's opening; by default the tools' schemas. Pass ``""`` for none, for
            example if the chat template has a place for ``tools.schemas``.
        max_calls: calls that a game allows; further ones are errors.
        call_reward, error_reward: reward of a turn with tool calls, per call and further per failed call.

    Raises:
        TypeError, ValueError: as :class:`Tools`.

    Examples:
        >>> from torchrl_lang.envs import QuestionGame, ToolGame
        >>> def multiply(a: int, b: int) -> int:
        ...     '''Multiply two numbers.
        ...
        ...     Args:
        ...         a: one number
        ...         b: the other
        ...     '''
        ...     return a * b
        >>> game = ToolGame(QuestionGame([("12 * 34 =", "408")]), [multiply], introduction="")
        >>> game.reset(seed=0)
        '12 * 34 ='
        >>> game.step('{"name": "multiply", "arguments": {"a": 12, "b": 34}}')
        ('408', 0.0, False)
        >>> game.step("408")
        ('', 1.0, True)
    """

    def __init__(
        self,
        game: TextGame,
        tools: Tools | Sequence[Callable[..., Any]],
        *,
        introduction: str | None = None,
        max_calls: int | None = None,
        call_reward: float = 0.0,
        error_reward: float = 0.0,
    ) -> None:
        self.game, self.tools = game, tools if isinstance(tools, Tools) else Tools(tools)
        self.introduction = self.tools.introduction if introduction is None else introduction
        self.max_calls, self.call_reward, self.error_reward = max_calls, call_reward, error_reward

    def reset(self, seed: int) -> str:
        """Begin a game; returns the introduction of the tools and the game's opening."""
        returned = self.game.reset(seed)
        self._calls = 0
        return self.introduction + (returned[0] if isinstance(returned, tuple) else returned)

    def step(self, text: str) -> tuple[str, float, bool] | tuple[str, float, bool, bool, Any]:
        """Run the tool calls of an utterance, or play it in the game."""
        left = None if self.max_calls is None else self.max_calls - self._calls
        results = self.tools.run(text, limit=left)
        if not results:
            return self.game.step(text)
        self._calls += len(results)
        reward = self.call_reward * len(results) + self.error_reward * sum(result.failed for result in results)
        return ToolText("\n".join(result.text for result in results)), reward, False

    def close(self) -> None:
        """Close the game."""
        close = getattr(self.game, "close", None)
        if close is not None:
            close()


class QuestionGame:
    """A question of a list, chosen by the seed; the utterance is the answer and ends the game.

    Args:
        questions: questions and their answers.
        score: called as ``score(answer, utterance)``, returns the reward; by default 1 if they are equal apart from
            white space around them, otherwise 0.

    Raises:
        ValueError: there are no questions.

    Examples:
        >>> from torchrl_lang.envs import QuestionGame
        >>> game = QuestionGame([("2 + 2 =", "4")])
        >>> game.reset(seed=5), game.step(" 4")
        ('2 + 2 =', ('', 1.0, True))
    """

    def __init__(
        self, questions: Sequence[tuple[str, str]], *, score: Callable[[str, str], float] | None = None
    ) -> None:
        if not questions:
            raise ValueError("QuestionGame needs questions with their answers, got none.")
        self.questions, self.score = questions, score

    def reset(self, seed: int) -> str:
        """Choose question ``seed`` modulo their number."""
        question, self.answer = self.questions[seed % len(self.questions)]
        return question

    def step(self, text: str) -> tuple[str, float, bool]:
        """Score an answer."""
        right = self.score(self.answer, text) if self.score else float(text.strip() == self.answer.strip())
        return "", right, True
