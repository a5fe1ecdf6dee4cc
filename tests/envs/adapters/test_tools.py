"""Tools that an agent calls beside a game."""

from __future__ import annotations

import json
from typing import Literal

import pytest

from tests.envs.conftest import Parrot
from tests.envs.helpers import say_after
from torchrl_lang.envs import QuestionGame, TextGameEnv, ToolGame, Tools, check_language_env
from torchrl_lang.text import CharTokenizer, from_row

LETTERS = CharTokenizer.from_alphabet("".join(map(chr, range(32, 127))) + "\n")


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
    assert result(call("add", a=2, b=3)) == ("5", False)
    assert result(f"  {call('add', a=2)}\n") == ("3", False)  # a default
    assert result(f"Let me see. <tool_call>\n{call('add', a=2)}\n</tool_call>") == ("3", False)
    assert result(f"<tool_call>{call('add', a=2)}") == ("3", False)  # the end may be cut, or be the end of the turn
    assert result('<tool_call>{"name": "look", "arguments": {"where": "up", "times": null}}</tool_call>') == (
        '{"where": "up", "times": null}',
        False,
    )
    two = f"<tool_call>{call('add', a=1)}</tool_call> and <tool_call>{call('look', where='down')}</tool_call>"
    assert TOOLS.run(two) == [("2", False), ("Error: LookupError: it is dark", True)]
    assert TOOLS.run(two, limit=1) == [("2", False), ("Error: no tool calls are left.", True)]


@pytest.mark.parametrize("text", ["", "5", "add(2)", "[1]", '{"name": "add"}', '{"a": 2}', '{"name": "add", "arg'])
def test_other_utterances_are_no_calls(text):
    assert TOOLS.run(text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (call("sub", a=2), "there is no tool 'sub', only add, look"),
        (call("add"), "missing arguments ['a'], the tool has ['a', 'b']"),
        (call("add", a=2, c=3), "unknown arguments ['c'], the tool has ['a', 'b']"),
        (call("add", a="2"), "argument 'a' must be integer, got '2'"),
        (call("add", a=True), "argument 'a' must be integer, got True"),
        (call("look", where="left"), "argument 'where' must be one of ['up', 'down'], got 'left'"),
        (call("look", where="up", times="x"), "argument 'times' must be number, got 'x'"),
        ('{"name": "add", "arguments": [2]}', "expected an object as arguments, got [2]"),
        ('{"name": 3, "arguments": {}}', "expected {\"name\": ..., \"arguments\": {...}}, got"),
        ("<tool_call>7</tool_call>", "expected {\"name\": ..., \"arguments\": {...}}, got 7"),
        ("<tool_call>add</tool_call>", "the call is not JSON (Expecting value: line 1"),
        ("<tool_call>" + "[" * 100000, "the call is not JSON ("),
    ],
)  # fmt: skip
def test_errors_are_results(text, message):
    got = result(text)
    assert got.failed
    assert got.text.startswith(f"Error: {message}")
    assert len(got.text) < 500


def test_schemas_are_those_of_chat_templates():
    from transformers.utils import get_json_schema

    assert TOOLS.schemas == [get_json_schema(add), get_json_schema(look)]
    for schema in TOOLS.schemas:
        assert json.dumps(schema) in TOOLS.introduction


def test_functions_that_cannot_be_tools():
    async def later(a: int) -> int:
        """Wait."""

    def undescribed(a: int) -> int:
        """Add."""

    with pytest.raises(TypeError, match=r"later .* is asynchronous"):
        Tools([later])
    with pytest.raises(TypeError, match=r"undescribed .* cannot be a tool: .* describes every argument"):
        Tools([undescribed])
    with pytest.raises(ValueError, match="Two tools have the name 'add'"):
        Tools([add, add])


def sums_env(batch_size=(2,), **options):
    questions = [(f"{n}+{n}=", str(2 * n)) for n in range(40, 60)]
    return TextGameEnv(
        lambda: ToolGame(QuestionGame(questions), [add], introduction="", **options),
        LETTERS,
        row_length=220,
        action_length=50,
        max_turns=3,
        batch_size=batch_size,
        seed=0,
    )


def parrot_env(batch_size=(2,)):
    def make():
        return ToolGame(Parrot(), [add], introduction="add(a, b)\n")

    return TextGameEnv(make, LETTERS, row_length=160, action_length=50, batch_size=batch_size, seed=0)


CALLS = [call("add", a=41, b=41), call("add", a="x"), "<tool_call>", "82"]


@pytest.mark.parametrize(("make", "words"), [(sums_env, CALLS), (parrot_env, [*CALLS, "a", "b"])])
def test_the_rules_of_language_environments(make, words):
    check_language_env(make(), lambda n: make([n]), utterances=words)


def test_a_call_is_a_turn_and_the_answer_ends_the_game():
    env = sums_env([1], call_reward=-0.125, error_reward=-0.5, max_calls=2)
    td = say_after(env, env.reset(), call("add", a=2, b=3))
    assert (td["reward"].item(), td["done"].item()) == (-0.125, False)
    td = say_after(env, td, call("sub", a=2, b=3))
    assert (td["reward"].item(), td["done"].item()) == (-0.625, False)
    question, _, first, *_, second = (turn.text for turn in from_row(td[0], LETTERS).turns)
    assert (first, second) == ("5", "Error: there is no tool 'sub', only add.")
    td = say_after(env, td, str(2 * int(question.split("+")[0])))
    assert (td["reward"].item(), td["terminated"].item()) == (1.0, True)


def test_calls_beyond_the_limit_are_errors_until_the_next_game():
    game = ToolGame(Parrot(), [add], introduction="", max_calls=1)
    for _ in range(2):
        assert game.reset(0) == "ab"
        assert game.step(call("add", a=1))[0] == "2"
        assert game.step(call("add", a=1))[0] == "Error: no tool calls are left."
        assert game.step("b") == ("bbb", 1.0, False, True, {})


def test_a_game_may_offer_its_own_methods():
    class Box:
        def reset(self, seed):
            self.number = seed % 10
            return "what is in the box?"

        def step(self, text):
            return "", float(text == str(self.number)), True

        def open(self, gently: bool) -> int:
            """Open the box.

            Args:
                gently: how to do it
            """
            return self.number

    box = Box()
    game = ToolGame(box, [box.open])
    assert game.reset(7).endswith("what is in the box?")
    assert '"name": "open"' in game.reset(7)
    assert game.step(call("open", gently=True)) == ("7", 0.0, False)
    assert game.step("7")[1:] == (1.0, True)


def test_questions_by_seed_and_by_score():
    game = QuestionGame([("a?", "x"), ("b?", "y")], score=lambda answer, text: -abs(len(answer) - len(text)))
    assert [game.reset(seed) for seed in range(3)] == ["a?", "b?", "a?"]
    assert game.step("xxx") == ("", -2, True)
    with pytest.raises(ValueError, match="got none"):
        QuestionGame([])
