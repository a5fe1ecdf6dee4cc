"""Python functions that an agent calls by JSON."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError, validate_call

from torchrl_lang._files import one_line, shorten
from torchrl_lang.envs.game_turn import TextGame, ToolText

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class Tools:
    """A registry of functions, with their JSON schemas as chat templates take them (``tools=``).

    A call is a JSON object ``{"name": ..., "arguments": {...}}``: the whole utterance, or any number of them between
    ``<tool_call>`` and ``</tool_call>`` with other text around.

    Args:
        functions: functions or bound methods with type hints and a docstring that describes every argument in Google's
            style (see :func:`transformers.utils.get_json_schema`). A result that is no text is written as JSON.

    Attributes:
        schemas: the functions' schemas.

    Raises:
        Exception: a function has no hints or descriptions, as :func:`transformers.utils.get_json_schema` has it.
        ValueError: two functions have one name, or one is asynchronous.

    Examples:
        >>> from torchrl_lang.envs.adapters.tools import Tools
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: one number
        ...         b: the other
        ...     '''
        ...     return a + b
        >>> tools = Tools([add])
        >>> tools.schemas[0]["function"]["parameters"]["required"]
        ['a', 'b']
        >>> tools.run('{"name": "add", "arguments": {"a": 2, "b": 3}}')
        ['5']
        >>> tools.run("Two and three are five.")
        []
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        from transformers.utils import get_json_schema

        checked: Callable[..., Any] = validate_call(config={"strict": True})
        self.schemas: list[dict[str, Any]] = [get_json_schema(function) for function in functions]
        names = [schema["function"]["name"] for schema in self.schemas]
        self._functions = dict(zip(names, map(checked, functions), strict=True))
        if len(self._functions) < len(functions) or any(map(inspect.iscoroutinefunction, functions)):
            raise ValueError(f"Tools are functions of different names, none of them asynchronous, got {functions}.")

    @property
    def introduction(self) -> str:
        """The schemas and how to call a tool, as text for an opening."""
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.schemas)
        return f'Tools:\n{schemas}\nTo call one, write {{"name": ..., "arguments": {{...}}}} and nothing else.\n\n'

    def run(self, text: str) -> list[str]:
        """Run the calls of an utterance in their order; errors are results, too. It is empty if no tool is called."""
        alone = {"name", "arguments"} <= _parsed(text).keys()
        return [self._run(_parsed(call)) for call in _TAGGED.findall(text) or [text] * alone]

    def _run(self, call: Mapping[str, Any]) -> str:
        name, arguments = call.get("name"), call.get("arguments")
        if name is None:
            return f"Error: {call['fault']}."
        if name not in self._functions:
            return f"Error: there is no tool {shorten(name)}, only {', '.join(self._functions) or 'none'}."
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments  # as text: OpenAI's form
            result = self._functions[name](**(given or {}))
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except ValidationError as error:
            wrong = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
            return f"Error: {shorten('; '.join(wrong), 300)[1:-1]}."
        except Exception as error:  # the agent reads it, as it would in a shell
            return f"Error: {type(error).__name__}: {one_line(error)}"


def _parsed(text: str) -> dict[str, Any]:
    """The fields of a call, or the fault of a text that is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {"fault": f"the call is not JSON ({one_line(error)})"}
    wanted = '{"name": ..., "arguments": {...}}'
    return call if isinstance(call, dict) and isinstance(call.get("name"), str) else {"fault": f"expected {wanted}"}


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
        call_reward: reward of each tool call.

    Examples:
        >>> from torchrl_lang.envs import ToolGame
        >>> from torchrl_lang.envs.adapters.tools import QuestionGame
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
        call_reward: float = 0.0,
    ) -> None:
        self.game, self.tools = game, tools if isinstance(tools, Tools) else Tools(tools)
        self.introduction = self.tools.introduction if introduction is None else introduction
        self.call_reward = call_reward

    def reset(self, seed: int) -> str:
        """Begin a game; returns the introduction of the tools and the game's opening."""
        returned = self.game.reset(seed)
        return self.introduction + (returned[0] if isinstance(returned, tuple) else returned)

    def step(self, text: str) -> tuple[str, float, bool] | tuple[str, float, bool, bool, Any]:
        """Run the tool calls of an utterance, or play it in the game."""
        results = self.tools.run(text)
        if not results:
            return self.game.step(text)
        return ToolText("\n".join(results)), self.call_reward * len(results), False


class QuestionGame:
    """A question of a list, chosen by the seed; the utterance is the answer and ends the game.

    Args:
        questions: questions and their answers.
        score: called as ``score(answer, utterance)``, returns the reward; by default 1 if they are equal apart from
            white space around them, otherwise 0.

    Examples:
        >>> from torchrl_lang.envs.adapters.tools import QuestionGame
        >>> game = QuestionGame([("2 + 2 =", "4")])
        >>> game.reset(seed=5), game.step(" 4")
        ('2 + 2 =', ('', 1.0, True))
    """

    def __init__(
        self, questions: Sequence[tuple[str, str]], *, score: Callable[[str, str], float] | None = None
    ) -> None:
        self.questions = questions
        self.score = score or (lambda answer, text: float(text.strip() == answer.strip()))

    def reset(self, seed: int) -> str:
        """Choose question ``seed`` modulo their number."""
        question, self.answer = self.questions[seed % len(self.questions)]
        return question

    def step(self, text: str) -> tuple[str, float, bool]:
        """Score an answer."""
        return "", self.score(self.answer, text), True
