"""The words that a transcript leaves, and games replayed with other words or rules."""

import pytest
import torch

from tests.envs.wordle.helpers import plain_feedback, text
from torchrl_lang.data import PolicySampler
from torchrl_lang.envs import wordle
from torchrl_lang.envs.wordle.transcript import replay_games, turns_of_rows
from torchrl_lang.schema import check_row

WORDS = wordle.demo_words(100)


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_consistent_words_of_rows_and_texts(rules):
    env = wordle.WordleEnv(WORDS, [12], rules=rules)
    rows = PolicySampler(env, wordle.RandomWordPlayer(WORDS))(range(12), 0)
    counts = wordle.count_consistent(rows, WORDS, rules=rules)
    for row, count in zip(rows, counts.tolist(), strict=True):
        found = wordle.consistent_words(row, WORDS, rules=rules)
        decoded = text(row)
        turns = [part.split("</a>") for part in decoded[3:].split("</s>") if "</a>" in part]
        played = [(guess, ["byg".index(c) for c in colours.strip("<>").split("><")]) for guess, colours in turns]
        assert found == [w for w in WORDS if all(plain_feedback(g, w, rules) == c for g, c in played)]
        assert len(found) == count
        assert wordle.consistent_words(decoded, WORDS, rules=rules) == found
        for symbols in ("byg", "⬛🟨🟩"):
            lines = "\n".join(f"{guess} {''.join(symbols[c] for c in colours)}" for guess, colours in played)
            assert wordle.consistent_words(lines, WORDS, rules=rules) == found


def test_nothing_played_leaves_all_words():
    assert wordle.consistent_words("", WORDS) == wordle.consistent_words("<a>", WORDS) == WORDS
    assert len(wordle.consistent_words("")) == 2250
    states = wordle.WordleEnv(WORDS, [5000]).reset()
    assert torch.equal(wordle.count_consistent(states, WORDS), torch.full((5000,), 100))
    assert wordle.count_consistent(states[:0], WORDS).shape == (0,)


@pytest.mark.parametrize(
    "transcript",
    ["crane", "crane byb", "crane bybbx", "Crane bybbb", "<a>CRANE</a><b><g><g><b><g></s>", "<a>crane</a><b><g><g>"]
    + ["<a>crane</a><b><g><g><b><x></s>", "<a>slate</a><b><g><g><b><g></s>cr?ne</a>", "<g><g><g><g><g>"],
)
def test_other_text_is_an_error(transcript):
    with pytest.raises(ValueError, match="a guess"):
        wordle.consistent_words(transcript, WORDS)


def test_guesses_without_colours_rule_nothing_out():
    transcript = "<s><a>crane</a><b><b><b><b><b></s>slopyy</a></s>slo"
    expected = wordle.consistent_words("crane bbbbb", WORDS)
    assert wordle.consistent_words(transcript, WORDS) == expected != WORDS
    assert wordle.consistent_words(transcript + "</a></eod><|pad|>", WORDS) == expected


def played(n=150, rules="official", words=WORDS, max_tries=6, prob_smart=0.7, **options):
    env = wordle.WordleEnv(words, [50], rules=rules, max_tries=max_tries, **options)
    return PolicySampler(env, wordle.RandomWordPlayer(WORDS, prob_smart=prob_smart, rules=rules))(range(n), seed=0)


@pytest.mark.parametrize("rules", ["official", "ilql"])
@pytest.mark.parametrize("max_tries", [1, 8])
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
            guess = wordle.WordIndex.text(after.guess[row, turn])
            assert after.colours[row, turn].tolist() == plain_feedback(guess, hidden, new)
            assert before.colours[row, turn].tolist() == plain_feedback(guess, hidden, old)
            changed += after.colours[row, turn].tolist() != before.colours[row, turn].tolist()
    assert changed
    check_row(replayed.rows, vocab_size=35)


def test_every_reason_is_counted_once():
    rows = played()
    guesses = replay_games(rows, WORDS, guesses=["fuzzy"])  # all guesses are hidden words
    assert not any(guesses.left_out.values())
    replayed = replay_games(rows, WORDS[:50], guesses=WORDS[:97], max_tries=3)
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
