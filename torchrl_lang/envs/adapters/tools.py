"""Python functions that an agent calls by JSON."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchrl_lang._files import one_line, shorten
from torchrl_lang.envs.game_turn import TextGame, ToolText

__all__ = ["QuestionGame", "ToolGame", "ToolResult", "Tools"]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class ToolResult(NamedTuple):
    """What came of a tool call."""

    text: str
    """The result as text, or the error."""
    failed: bool
    """Whether there was no such tool, the arguments did not fit, or the tool raised an error."""


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
        TypeError: a function has no hints or descriptions, or is asynchronous.
        ValueError: two functions have one name.

    Examples:
        >>> from torchrl_lang.envs import Tools
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
        [ToolResult(text='5', failed=False)]
        >>> tools.run("Two and three are five.")
        []
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        from transformers.utils import get_json_schema

        self.schemas: list[dict[str, Any]] = []
        self._functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {}
        for function in functions:
            if inspect.iscoroutinefunction(function):
                raise TypeError(f"The tool {function} is asynchronous: pass a function that returns its result.")
            try:
                schema = get_json_schema(function)
            except Exception as error:
                raise TypeError(
                    f"{function} cannot be a tool: {one_line(error)} Tools need type hints and a docstring that "
                    f"describes every argument."
                ) from error
            name = schema["function"]["name"]
            if name in self._functions:
                raise ValueError(f"Two tools have the name {name!r}: rename one of the functions.")
            self.schemas.append(schema)
            self._functions[name] = function, schema["function"].get("parameters") or {}

    @property
    def introduction(self) -> str:
        """The schemas and how to call a tool, as text for an opening."""
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.schemas)
        return f'Tools:\n{schemas}\nTo call one, write {{"name": ..., "arguments": {{...}}}} and nothing else.\n\n'

    def run(self, text: str, *, limit: int | None = None) -> list[ToolResult]:
        """Run the calls of an utterance in their order; errors are results.

        Args:
            text: the utterance; if it calls no tool, the list is empty.
            limit: number of calls that may run; the others are errors.
        """
        calls = [_parse(call) for call in _TAGGED.findall(text)]
        if not calls:
            call, _ = _parse(text)
            calls = [(call, None)] if isinstance(call, dict) and {"name", "arguments"} <= call.keys() else []
        refused = ToolResult("Error: no tool calls are left.", True)
        return [self._run(*call) if limit is None or i < limit else refused for i, call in enumerate(calls)]

    def _run(self, call: Any, wrong: str | None) -> ToolResult:
        if wrong is None and not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            wrong = f'expected {{"name": ..., "arguments": {{...}}}}, got {shorten(call)}'
        name = "" if wrong else call["name"]
        if wrong is None and name not in self._functions:
            wrong = f"there is no tool {shorten(name)}, only {', '.join(self._functions) or 'none'}"
        if wrong is None:
            function, parameters = self._functions[name]
            arguments = call.get("arguments", {})
            wrong = _misfit(arguments, parameters)
        if wrong is not None:
            return ToolResult(f"Error: {wrong}.", True)
        try:
            result = function(**arguments)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # the agent reads it, as it would in a shell
            return ToolResult(f"Error: {type(error).__name__}: {one_line(error)}", True)
        return ToolResult(text, False)


def _parse(text: str) -> tuple[Any, str | None]:
    """A JSON value, and what is wrong with the text if it is none."""
    try:
        return json.loads(text), None
    except (ValueError, RecursionError) as error:
        return None, f"the call is not JSON ({one_line(error)})"


def _misfit(arguments: Any, parameters: dict[str, Any]) -> str | None:
    """Why arguments do not fit a schema, or None. The types of elements are the function's concern."""
    if not isinstance(arguments, dict):
        return f"expected an object as arguments, got {shorten(arguments)}"
    known = parameters.get("properties", {})
    missing = [name for name in parameters.get("required", []) if name not in arguments]
    unknown = [name for name in arguments if name not in known]
    if missing or unknown:
        kind, names = ("missing", missing) if missing else ("unknown", unknown)
        return f"{kind} arguments {shorten(names)}, the tool has {list(known)}"
    for name, value in arguments.items():
        schema = known[name]
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        if value is None and schema.get("nullable"):
            continue
        if types and not any(_is(value, kind) for kind in types):
            return f"argument {name!r} must be {' or '.join(types)}, got {shorten(value)}"
        if "enum" in schema and value not in schema["enum"]:
            return f"argument {name!r} must be one of {schema['enum']}, got {shorten(value)}"
    return None


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON schema; True and False are no numbers there."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES.get(kind, object))


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
