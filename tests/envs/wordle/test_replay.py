"""Rows from guesses and colours are the environment's, and replayed games keep what they should."""

from __future__ import annotations

import pytest
import torch

from tests.envs.wordle.helpers import plain_feedback
from torchrl_lang.data import PolicySampler
from torchrl_lang.envs.wordle import RandomWordPlayer, WordIndex, WordleEnv, demo_words
from torchrl_lang.envs.wordle.transcript import replay_games, turns_of_rows
from torchrl_lang.schema import check_row

WORDS = demo_words(80)


def played(n=150, rules="official", words=WORDS, max_tries=6, prob_smart=0.7, **options):
    env = WordleEnv(words, [50], rules=rules, max_tries=max_tries, **options)
    return PolicySampler(env, RandomWordPlayer(WORDS, prob_smart=prob_smart, rules=rules))(range(n), seed=0)


@pytest.mark.parametrize("rules", ["official", "ilql"])
@pytest.mark.parametrize("max_tries", [1, 6, 8])
def test_the_same_words_and_rules_give_the_same_rows(rules, max_tries):
    rows = played(rules=rules, max_tries=max_tries)
    replayed = replay_games(rows, WORDS, rules=rules, old_rules=rules, max_tries=max_tries)
    assert torch.equal(replayed.kept, torch.arange(150))
    for key in rows.keys():
        assert torch.equal(replayed.rows[key], rows[key]), key
    assert not any(replayed.left_out.values())


@pytest.mark.parametrize(("old", "new"), [("official", "ilql"), ("ilql", "official")])
def test_other_rules_colour_the_same_guesses(old, new):
    rows = played(rules=old)
    replayed = replay_games(rows, WORDS, rules=new, old_rules=old)
    before, after = turns_of_rows(rows), turns_of_rows(replayed.rows)
    assert torch.equal(before.guess[:, :6], after.guess[:, :6])
    assert torch.equal(before.tries, after.tries)
    assert torch.equal(rows["token_reward"].sum(-1), replayed.rows["token_reward"].sum(-1))  # solved games stay solved
    changed = 0
    for row in range(len(rows)):
        hidden = WORDS[int(replayed.hidden_word[row])]
        for turn in range(int(after.tries[row])):
            guess = WordIndex.text(after.guess[row, turn])
            assert after.colours[row, turn].tolist() == plain_feedback(guess, hidden, new)
            assert before.colours[row, turn].tolist() == plain_feedback(guess, hidden, old)
            changed += after.colours[row, turn].tolist() != before.colours[row, turn].tolist()
    assert changed
    check_row(replayed.rows, vocab_size=35)


def test_every_reason_is_counted_once():
    rows = played()
    guesses = replay_games(rows, WORDS, guesses=["fuzzy"])  # all guesses are hidden words
    assert not any(guesses.left_out.values())
    replayed = replay_games(rows, WORDS[:40], guesses=WORDS[:78], max_tries=3)
    assert len(replayed.rows) + sum(replayed.left_out.values()) == 150
    assert all(replayed.left_out[reason] for reason in list(replayed.left_out)[1:])
    strict = played(words=WORDS[:40], guesses="words", prob_smart=0.0)  # other guesses get no colours there
    mute = turns_of_rows(strict).answered < turns_of_rows(strict).tries
    for rows, words in ((strict, ["zzzzz"]), (strict[:0], WORDS)):
        assert replay_games(rows, words).rows.shape == (0,)
    assert replay_games(strict, WORDS).left_out["a guess got no colours"] == int(mute.sum()) > 0


def test_unfinished_games_stay_unfinished():
    """A game of three guesses in a game of six is truncated."""
    rows = played(max_tries=3)
    replayed = replay_games(rows, WORDS).rows
    solved = rows["token_reward"].sum(-1) > -3
    assert torch.equal(replayed["terminated"][:, 0], solved)
    assert torch.equal(replayed["truncated"], ~replayed["terminated"])
    assert not (replayed["tokens"][~solved] == 34).any()
    check_row(replayed)
