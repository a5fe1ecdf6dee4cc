"""What a text environment does with texts that cannot be written and with games that return the wrong things."""

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


# -- texts that cannot be written --------------------------------------------------------------------------------------


def test_a_reply_that_cannot_be_encoded_truncates_its_row_and_is_warned_of_once():
    env = make(turn=("what?", 0.5, False), n=2)
    env.reset()
    with pytest.warns(
        UserWarning, match=r"Game 0 of the batch \(seed \d+, turn 1\) wrote 'what\?', which .*'w' at pos"
    ):
        td = step(env)
    assert text(env, td) == "<s>a</s>a</a>"
    assert td["truncated"].all()
    assert not td["terminated"].any()
    assert (td["reward"] == 0.5).all()  # the turn was played
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reset()
        assert step(env)["truncated"].all()


def test_a_game_that_ends_with_such_a_reply_is_both_terminated_and_truncated():
    env = make(turn=("what?", 1.0, True))
    env.reset()
    with pytest.warns(UserWarning, match="the row is truncated"):
        td = step(env)
    assert text(env, td) == "<s>a</s>a</a></eod>"
    assert td["terminated"].all()
    assert td["truncated"].all()


def test_an_opening_that_cannot_be_encoded_is_left_out_and_the_first_turn_is_the_last():
    env = make(opening="hello")
    with pytest.warns(
        UserWarning, match=r"Game 0 of the batch \(seed \d+, turn 0\) wrote 'hello', which the tokenizer"
    ):
        td = env.reset()
    assert text(env, td) == "<a>"
    assert not td["done"].any()
    td = step(env)
    assert text(env, td) == "<a>a</a>b</s>"
    assert td["truncated"].all()


@pytest.mark.parametrize("length", [13, 14, 15, 40])
def test_an_opening_that_is_too_long_is_cut_so_that_one_turn_fits(length):
    """Of 20 tokens an utterance takes 3 and its end 1, and 2 stand around the opening: 14 are left."""
    env = make(opening="ab" * 20, turn=("", 0.0, False)) if length == 40 else make(opening="a" * length)
    if length <= 14:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            td = env.reset()
    else:
        with pytest.warns(UserWarning, match=rf"opens with {length} tokens, of which 14 fit into row_length=20"):
            td = env.reset()
    assert int(td["attention_mask"].sum()) == 2 + min(length, 14)
    td = step(env, "ab")
    assert td["truncated"].all()
    assert int(td["agent_mask"].sum()) == 3


def test_a_cut_opening_truncates_even_where_the_game_ends():
    env = make(opening="a" * 40, turn=("", 1.0, True))
    with pytest.warns(UserWarning, match="opens with 40 tokens"):
        env.reset()
    td = step(env)
    assert td["terminated"].all()
    assert td["truncated"].all()


def test_a_row_too_narrow_for_any_opening_still_has_its_turn():
    env = make(opening="ab", row_length=5, action_length=3)
    with pytest.warns(UserWarning, match="of which 0 fit"):
        td = env.reset()
    assert text(env, td) == "<a>"
    assert step(env, "ab")["truncated"].all()


def test_only_rows_that_lost_text_are_truncated():
    openings = iter(["a", "what", "b"])
    env = TextGameEnv(
        lambda: Scripted(next(openings)),
        CharTokenizer.from_alphabet("ab"),
        row_length=40,
        action_length=3,
        batch_size=[3],
    )
    with pytest.warns(UserWarning, match="Game 1 of the batch"):
        env.reset()
    td = step(env)
    assert td["truncated"].flatten().tolist() == [False, True, False]
    td = env.maybe_reset(td)  # row 1 begins anew, and its game opens as before
    assert step(env)["truncated"].flatten().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opening": "what"}, r"turn 0\) wrote 'what', which the tokenizer cannot encode .*: use a tokenizer"),
        ({"opening": "a" * 15}, r"turn 0\) opens with 15 tokens, of which 14 fit into row_length=20: give at least r"),
        ({"turn": ("what", 0.0, False)}, r"turn 1\) wrote 'what', which the tokenizer cannot encode"),
        ({"turn": ("a" * 15, 0.0, False)}, r"turn 1\) replies with 15 tokens, of which 14 fit .*give at least row_l"),
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
    with pytest.raises(RuntimeError, match=r"call reset\(\) first"):  # games are out of step with their rows
        step(env)


@pytest.mark.parametrize("turn", [("a" * 14, 0.0, False), ("a" * 13, 0.0, True)])
def test_what_just_fits_is_no_error(turn):
    env = make(on_bad_text="raise", turn=turn)
    env.reset()
    td = step(env)
    assert td["attention_mask"].all()
    assert td["done"].all()


def test_there_is_no_third_way():
    with pytest.raises(ValueError, match="on_bad_text='ignore' is unknown"):
        make(on_bad_text="ignore")


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
    with pytest.raises(ValueError, match=r"turn 1\) was truncated, so row 0 cannot be continued"):
        other.reset(over.select(*ROW_KEYS).clone(), set_state=True, game_seed=other.game_seed)


# -- what games return -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", ["ab", ("ab", {"level": 3})])
@pytest.mark.parametrize(
    ("turn", "flags"),
    [
        (("b", 1, False), (False, False)),
        (("b", np.float32(1), np.True_), (True, False)),
        (("b", torch.tensor(1.0), False, True, {}), (False, True)),
        (("b", 1.0, True, True, None), (True, True)),
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
    env = make(turn=("b", 0.5, False, True, {}), n=3)
    check_language_env(env, utterances=["a", "b"])


@pytest.mark.parametrize("opening", [None, b"ab", 3, ("ab",), ("ab", {}, 1), (None, {}), ["ab", {}]])
def test_a_reset_that_returns_no_text_is_an_error(opening):
    with pytest.raises(
        TypeError, match=r"Game 0 of the batch \(seed \d+, turn 0\) returned .* from reset, expected its"
    ):
        make(opening).reset()


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (None, "returned None from step, no tuple, expected"),
        ("b", "returned 'b' from step, no tuple"),
        (("b", 1.0), "2 values, expected"),
        (("b", 1.0, True, {}), r"4 values, expected \(text, reward, terminated\) or \(text, reward, terminated, trun"),
        ((None, 1.0, True), "returned None as its reply, expected a string"),
        ((b"b", 1.0, True), "returned b'b' as its reply"),
        (("b", None, True), "returned None as its reward, expected one number"),
        (("b", "1.0", True), "returned '1.0' as its reward"),
        (("b", np.ones(2), True), "as its reward"),
        (("b", 1j, True), "as its reward"),
        (("b", 1.0, "False"), "returned 'False' as 'terminated', expected True or False"),
        (("b", 1.0, None), "returned None as 'terminated'"),
        (("b", 1.0, 2), "returned 2 as 'terminated'"),
        (("b", 1.0, True, {}, {}), r"returned {} as 'truncated'"),
        (("x" * 10_000, None, True), "as its reward"),
    ],
)
def test_a_step_that_returns_other_things_is_an_error(turn, message):
    env = make(turn=turn)
    env.reset()
    with pytest.raises(TypeError, match=message) as caught:
        step(env)
    assert str(caught.value).startswith("Game 0 of the batch (seed ")
    assert "turn 1" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -np.inf, 1e39, torch.tensor(float("nan"))])
def test_a_reward_that_is_not_finite_is_refused_with_game_turn_and_value(reward):
    class Second(Scripted):
        turns = 0

        def step(self, text):
            self.turns += 1
            return "b", reward if self.turns == 2 else 1.0, False

    tokenizer = CharTokenizer.from_alphabet("ab")
    env = TextGameEnv(Second, tokenizer, row_length=40, action_length=3, batch_size=[2])
    env.reset()
    step(env)
    with pytest.raises(
        ValueError, match=r"Game 0 of the batch \(seed \d+, turn 2\) returned the reward .*finite"
    ) as caught:
        step(env)
    assert str(reward).replace("torch.", "") in str(caught.value)


def test_a_game_that_fails_says_which_and_when():
    class Broken(Scripted):
        def step(self, text):
            raise ZeroDivisionError("oh")

    env = TextGameEnv(Broken, CharTokenizer.from_alphabet("ab"), row_length=20, action_length=3, batch_size=[1])
    env.reset()
    with pytest.raises(ZeroDivisionError) as caught:
        step(env, "aa")
    assert caught.value.__notes__[0].startswith("Game 0 of the batch (seed ")
    assert caught.value.__notes__[0].endswith("turn 1) was playing 'aa'.")
