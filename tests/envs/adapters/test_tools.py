"""Tools that an agent calls beside a game."""

from __future__ import annotations

import json
from typing import Literal

import pytest

from tests.envs.helpers import LETTERS, check_game, in_letters, say_after
from torchrl_lang.envs import ToolGame
from torchrl_lang.envs.adapters.tools import QuestionGame, Tools
from torchrl_lang.text import from_row


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: the other
    """
    return a + b


def look(where: Literal["up", "down"], times: float | None = None) -> dict:
    """Look somewhere.

    Args:
        where: where to look
        times: how often
    """
    if where == "down":
        raise LookupError("it is\ndark")
    return {"where": where, "times": times}


TOOLS = Tools([add, look])


def call(name, /, **arguments):
    return json.dumps({"name": name, "arguments": arguments})


def result(text):
    (one,) = TOOLS.run(text)
    return one


def test_calls_in_both_forms():
    assert result(call("add", a=2, b=3)) == "5"
    assert result(f"  {call('add', a=2)}\n") == "3"  # a default
    assert result(f"Let me see. <tool_call>\n{call('add', a=2)}\n</tool_call>") == "3"
    assert result(json.dumps({"name": "add", "arguments": '{"a": 2, "b": 3}'})) == "5"  # as text
    assert result(f"<tool_call>{call('add', a=2)}") == "3"  # the end may be cut, or be the end of the turn
    assert result('<tool_call>{"name": "look", "arguments": {"where": "up", "times": null}}</tool_call>') == (
        '{"where": "up", "times": null}'
    )
    for text in ("", "5", "add(2)", "[1]", '{"name": "add"}', '{"a": 2}', '{"name": "add", "arg'):
        assert TOOLS.run(text) == []
    two = f"<tool_call>{call('add', a=1)}</tool_call> and <tool_call>{call('look', where='down')}</tool_call>"
    assert TOOLS.run(two) == ["2", "Error: LookupError: it is dark"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (call("sub", a=2), "there is no tool 'sub', only add, look"),
        (call("add"), "a: Missing required argument"),
        (call("add", a=2, c=3), "c: Unexpected keyword argument"),
        (call("add", a="2"), "a: Input should be a valid integer"),
        (call("look", where="left"), "where: Input should be 'up' or 'down'"),
        ('{"name": "add", "arguments": [2]}', "TypeError"),
        ('{"name": "sub", "arguments": {}, "self": 1, "fault": "x"}', "there is no tool 'sub', only add, look"),
        ("<tool_call>7</tool_call>", 'expected {"name": ..., "arguments": {...}}'),
        ("<tool_call>" + "[" * 100000, "the call is not JSON ("),
    ],
)
def test_errors_are_results(text, message):
    got = result(text)
    assert got.startswith(f"Error: {message}")
    assert len(got) < 500


def test_functions_that_cannot_be_tools():
    async def later(a: int) -> int:
        """Wait.

        Args:
            a: seconds
        """

    def undescribed(a: int) -> int:
        """Add."""

    for functions in ([later], [undescribed], [add, add]):
        with pytest.raises(Exception, match=r"undescribed|different names"):
            Tools(functions)


SIZES = {"row_length": 220, "action_length": 50, "max_turns": 3}


def sums(**options):
    questions = [(f"{n}+{n}=", str(2 * n)) for n in range(40, 60)]
    return lambda: ToolGame(QuestionGame(questions), [add], introduction="", **options)


def test_the_rules_of_language_environments():
    check_game(sums(), call("add", a=41, b=41), call("add", a="x"), "<tool_call>", "82", **SIZES)


def test_a_call_is_a_turn_and_the_answer_ends_the_game():
    env = in_letters(sums(call_reward=-0.125), 1, **SIZES)
    td = say_after(env, env.reset(), call("add", a=2, b=3))
    assert (td["reward"].item(), td["done"].item()) == (-0.125, False)
    td = say_after(env, td, call("sub", a=2, b=3))
    assert (td["reward"].item(), td["done"].item()) == (-0.125, False)
    question, _, first, *_, second = (turn.text for turn in from_row(td[0], LETTERS).turns)
    assert (first, second) == ("5", "Error: there is no tool 'sub', only add.")
    td = say_after(env, td, str(2 * int(question.split("+")[0])))
    assert (td["reward"].item(), td["terminated"].item()) == (1.0, True)


def test_questions_by_seed_and_by_score():
    game = QuestionGame([("a?", "x"), ("b?", "y")], score=lambda answer, text: -abs(len(answer) - len(text)))
    assert [game.reset(seed) for seed in range(3)] == ["a?", "b?", "a?"]
    assert game.step("xxx") == ("", -2, True)
