"""Texts that cannot be encoded or do not fit, and games that return the wrong things."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.envs import TextGameEnv, check_language_env
from torchrl_lang.schema import ROW_KEYS, check_row
from torchrl_lang.text import CharTokenizer


class Scripted:
    """Returns from ``reset`` and from every ``step`` what it was made with."""

    def __init__(self, opening="a", turn=("b", 0.5, False)):
        self.opening, self.turn = opening, turn

    def reset(self, seed):
        return self.opening

    def step(self, text):
        if isinstance(self.turn, Exception):
            raise self.turn
        return self.turn


def make(opening="a", turn=("b", 0.5, False), n=1, **options):
    tokenizer = CharTokenizer.from_alphabet("ab")
    options = {"row_length": 20, "action_length": 3, "seed": 0, **options}
    return TextGameEnv(lambda: Scripted(opening, turn), tokenizer, batch_size=[n], **options)


def step(env, text="a"):
    ids = [*env.tokenizer.encode(text), env.tokenizer.control.end_of_action]
    action = torch.tensor([ids + [env.tokenizer.control.pad] * (env.action_length - len(ids))] * env.batch_size[0])
    return env.step(TensorDict(action=action, batch_size=env.batch_size))["next"]


def text(env, td):
    return env.tokenizer.decode(td["tokens"][0][td["attention_mask"][0]])


@pytest.mark.parametrize(("over", "end"), [(False, ""), (True, "</eod>")])
def test_a_reply_that_cannot_be_encoded_truncates_its_row_and_is_warned_of_once(over, end):
    env = make(turn=("what?", 0.5, over), n=2)
    env.reset()
    with pytest.warns(UserWarning, match=r"Game 0 of the batch \(seed \d+, turn 1\) wrote 'what\?'"):
        td = step(env)
    assert text(env, td) == f"<s>a</s>a</a>{end}"
    assert td["truncated"].all()
    assert td["terminated"].all() == over
    assert (td["reward"] == 0.5).all()  # the turn was played
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset()
        assert step(env)["truncated"].all()


def test_an_opening_that_cannot_be_encoded_is_left_out_and_the_first_turn_is_the_last():
    env = make(opening="hello")
    with pytest.warns(UserWarning, match="turn 0.* wrote 'hello'"):
        td = env.reset()
    assert text(env, td) == "<a>"
    assert not td["done"].any()
    td = step(env)
    assert text(env, td) == "<a>a</a>b</s>"
    assert td["truncated"].all()


@pytest.mark.parametrize("length", [14, 15, 40])
def test_an_opening_that_is_too_long_is_cut_so_that_one_turn_fits(length):
    """Of 20 tokens an utterance takes 3 and its end 1, and 2 stand around the opening: 14 are left."""
    env = make(opening="a" * length, turn=("", 0.0, length == 40))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        td = env.reset()
    assert len(seen) == (length > 14)
    assert int(td["attention_mask"].sum()) == 16
    td = step(env, "ab")
    assert td["truncated"].all()
    assert td["terminated"].all() == (length == 40)
    assert int(td["agent_mask"].sum()) == 3


def test_only_rows_that_lost_text_are_truncated():
    openings = iter(["a", "what", "b"])
    options = {"row_length": 40, "action_length": 3, "batch_size": [3]}
    env = TextGameEnv(lambda: Scripted(next(openings)), CharTokenizer.from_alphabet("ab"), **options)
    with pytest.warns(UserWarning, match="Game 1 of the batch"):
        env.reset()
    td = step(env)
    assert td["truncated"].flatten().tolist() == [False, True, False]
    env.maybe_reset(td)  # row 1 begins again, and its game opens as before
    assert step(env)["truncated"].flatten().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opening": "what"}, r"turn 0\) wrote 'what'"),
        ({"opening": "a" * 15}, r"turn 0\) opens with 15 tokens, of which 14 fit"),
        ({"turn": ("what", 0.0, False)}, r"turn 1\) wrote 'what'"),
        ({"turn": ("a" * 15, 0.0, False)}, r"turn 1\) replies with 15 tokens, of which 14 fit"),
        ({"turn": ("a" * 14, 0.0, True)}, r"turn 1\) replies with 14 tokens, of which 13 fit"),
    ],
)
def test_all_of_them_are_errors_where_that_is_asked_for(options, message):
    env = make(on_bad_text="raise", **options)

    def play():
        env.reset()
        step(env)

    with pytest.raises(ValueError, match=rf"Game 0 of the batch \(seed \d+, {message}"):
        play()
    with pytest.raises(RuntimeError, match="reset"):  # games are out of step with their rows
        step(env)
    with pytest.raises(ValueError, match="on_bad_text='ignore'"):
        make(on_bad_text="ignore")


@pytest.mark.parametrize("turn", [("a" * 14, 0.0, False), ("a" * 13, 0.0, True)])
def test_what_just_fits_is_no_error(turn):
    env = make(on_bad_text="raise", turn=turn)
    env.reset()
    td = step(env)
    assert td["attention_mask"].all()
    assert td["done"].all()


def test_rows_that_lost_text_cannot_be_continued_as_if_they_had_not():
    env = make(opening="a" * 40)
    with pytest.warns(UserWarning, match="opens with"):
        td = env.reset()
    came = env.reset(td.select(*ROW_KEYS).clone(), set_state=True, game_seed=env.game_seed)
    assert torch.equal(came["tokens"], td["tokens"])
    assert step(env)["truncated"].all()
    other = make(turn=("b", 0.0, False, True, {}))
    other.reset()
    over = step(other)
    with pytest.raises(ValueError, match=r"turn 1\) was truncated"):
        other.reset(over.select(*ROW_KEYS).clone(), set_state=True, game_seed=other.game_seed)


@pytest.mark.parametrize("opening", ["ab", ("ab", {"level": 3})])
@pytest.mark.parametrize(
    ("turn", "flags"),
    [
        (("b", 1, False), (False, False)),
        (("b", np.float32(1), np.True_), (True, False)),
        (("b", torch.tensor(1.0), False, True, {}), (False, True)),
        (("b", True, 0, 1, {}), (False, True)),
    ],
)
def test_games_may_return_three_values_or_five(opening, turn, flags):
    env = make(opening, turn)
    assert text(env, env.reset()) == "<s>ab</s>"
    td = step(env)
    assert text(env, td).startswith("<s>ab</s>a</a>b</s>")
    assert (td["terminated"].item(), td["truncated"].item()) == flags
    assert td["reward"].item() == 1
    check_row(td)


def test_the_contract_holds_where_a_game_truncates():
    check_language_env(make(turn=("b", 0.5, False, True, {}), n=3), utterances=["a", "b"])


@pytest.mark.parametrize("opening", [None, b"ab", ("ab",), (None, {})])
def test_a_reset_that_returns_no_text_is_an_error(opening):
    with pytest.raises(TypeError, match=r"Game 0 of the batch \(seed \d+, turn 0\) returned .* from reset"):
        make(opening).reset()


@pytest.mark.parametrize(
    ("turn", "noun"),
    [
        *((turn, "from step") for turn in (None, "b", ("b", 1.0), ("b", 1.0, True, {}), (None, 1.0, True))),
        *((("b", reward, True), "reward") for reward in (None, "1.0", np.ones(2), 1j, float("nan"), -np.inf, 1e39)),
        *((("b", 1.0, over), "terminated") for over in ("False", None, 2)),
        (("b", 1.0, True, {}, {}), "truncated"),
        (("x" * 10_000, None, True), "reward"),
    ],
)
def test_a_step_that_returns_other_things_is_an_error(turn, noun):
    env = make(turn=turn)
    env.reset()
    with pytest.raises((TypeError, ValueError), match=rf"Game 0 of the batch \(seed \d+, turn 1\) .*{noun}") as caught:
        step(env)
    assert len(str(caught.value)) < 400


def test_a_game_that_fails_is_named():
    env = make(turn=ZeroDivisionError("oh"))
    env.reset()
    with pytest.raises(ZeroDivisionError) as caught:
        step(env, "aa")
    assert caught.value.__notes__[0].startswith("Game 0 of the batch (seed ")
    assert caught.value.__notes__[0].endswith("turn 1) was playing 'aa'.")
