"""Continuing from a transcript: what the paper's code fails to do (it starts a new game instead)."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.envs.wordle.helpers import letters, play, text
from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv
from torchrl_lang.envs.wordle.rules import feedback, feedback_code
from torchrl_lang.schema import ROW_KEYS


def rows_of(td) -> TensorDict:
    return td.select(*ROW_KEYS).clone()


def two_guesses(rules: str = "official", batch: int = 64):
    env = WordleEnv(batch_size=[batch], seed=0, rules=rules)
    player = RandomWordPlayer(seed=1)
    td = env.reset()
    for _ in range(2):
        td = env.step(player(td))["next"]
    return env, td


def hidden(word: int, batch: int = 1) -> TensorDict:
    return TensorDict(hidden_word=torch.full((batch,), word), batch_size=[batch])


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_a_hidden_word_is_drawn_that_agrees_with_all_colours(rules):
    _, td = two_guesses(rules)
    live = ~td["done"][:, 0]
    rows = rows_of(td)[live]
    env = WordleEnv(batch_size=[int(live.sum())], seed=3, rules=rules, consistent=True)
    begun = env.reset(rows.clone(), set_state=True)
    word = letters(*env.words)[env.hidden_word]
    for turn in range(2):
        at = 1 + 12 * turn
        guess, said = rows["tokens"][:, at : at + 5], rows["tokens"][:, at + 6 : at + 11]
        drawn = feedback(guess, word, rules)
        assert torch.equal(torch.tensor([27, 28, 26])[drawn], said)
    assert begun["consistent"].gather(-1, env.hidden_word[:, None]).all()
    assert not begun["consistent"].all()


def test_the_draw_is_uniform_over_what_is_possible_and_follows_the_seed():
    words = ["baker", "maker", "taker", "wager", "zebra"]
    env = WordleEnv(words, batch_size=[3000], seed=0)
    td = play(env, env.reset(hidden(0, 3000)), *["cater"] * 3000)
    assert feedback_code(feedback(letters("cater"), letters(*words))).unique().numel() > 1

    def drawn(seed):
        other = WordleEnv(words, batch_size=[3000], seed=seed)
        other.reset(rows_of(td), set_state=True)
        return other.hidden_word

    first = drawn(1)
    agree = (feedback(letters("cater"), letters(*words)) == feedback(letters("cater"), letters("baker"))).all(-1)
    count, n = first.bincount(minlength=5), int(agree.sum())
    assert n > 1
    assert (count[~agree] == 0).all()
    assert ((count[agree] - 3000 / n).abs() < 5 * (3000 / n) ** 0.5).all()
    assert torch.equal(first, drawn(1))
    assert not torch.equal(first, drawn(2))


def test_transcripts_that_cannot_go_on():
    words = ["crane", "slate", "abide"]
    env = WordleEnv(words, batch_size=[1], max_tries=2)
    one = play(env, env.reset(hidden(1)), "crane")
    rows = rows_of(one)
    with pytest.raises(ValueError, match=r"Rows \[0\] cannot be continued, they disagree with their hidden_word"):
        env.reset(rows.clone().update(hidden(0)), set_state=True)
    strange = rows.clone()
    strange["tokens"][0, 7:12] = 28  # five yellow squares
    with pytest.raises(ValueError, match=r"Rows \[0\] cannot be continued, they agree with no word"):
        env.reset(strange, set_state=True)
    solved = rows.clone()
    solved["tokens"][0, 7:12] = 26
    with pytest.raises(ValueError, match=r"Rows \[0\] cannot be continued, they are over: the game is solved"):
        env.reset(solved, set_state=True)
    with pytest.raises(ValueError, match="cannot be continued"):
        env.reset(rows_of(play(env, one, "abide")), set_state=True)
    with pytest.raises(KeyError, match="set_state"):
        env.reset(TensorDict(batch_size=[1]), set_state=True)
    # After the errors the environment is as good as new.
    assert text(env.reset(rows, set_state=True)[0]) == text(one[0])


@pytest.mark.parametrize("first", ["", "xx"])
def test_a_valid_guess_without_colours_cannot_have_been_played(first):
    env = WordleEnv(["crane", "slate"], batch_size=[2], guesses="words")
    before = play(env, env.reset(), first, first) if first else env.reset()
    rows = rows_of(play(env, before, "zzzzz", "zzzzz"))  # on no list: no colours
    env.reset(rows.clone(), set_state=True)
    at = int(before["attention_mask"][1].sum())
    rows["tokens"][1, at : at + 5] = letters("slate")[0]
    with pytest.raises(ValueError, match=r"Rows \[1\] cannot be continued, they are not rows of a game"):
        env.reset(rows.clone(), set_state=True)
    env.reset(rows.clone().set("_reset", torch.tensor([[True], [False]])), set_state=True)


def test_a_long_guess_that_ends_in_a_word_is_no_valid_one():
    env = WordleEnv(["crane"], batch_size=[1], action_length=8)
    rows = rows_of(play(env, env.reset(), "acrane"))
    again = env.reset(rows.clone(), set_state=True)
    assert (again["tokens"] == rows["tokens"]).all()
