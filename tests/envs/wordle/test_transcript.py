"""The words that a transcript leaves."""

from __future__ import annotations

import pytest
import torch

from tests.envs.wordle.helpers import plain_feedback, text
from torchrl_lang.data import PolicySampler
from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv, consistent_words, count_consistent, demo_words

WORDS = demo_words(100)


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_consistent_words_of_rows_and_texts(rules):
    env = WordleEnv(WORDS, [12], rules=rules)
    rows = PolicySampler(env, RandomWordPlayer(WORDS))(range(12), 0)
    counts = count_consistent(rows, WORDS, rules=rules)
    for row, count in zip(rows, counts.tolist(), strict=True):
        found = consistent_words(row, WORDS, rules=rules)
        decoded = text(row)
        turns = [part.split("</a>") for part in decoded[3:].split("</s>") if "</a>" in part]
        played = [(guess, ["byg".index(c) for c in colours.strip("<>").split("><")]) for guess, colours in turns]
        assert found == [w for w in WORDS if all(plain_feedback(g, w, rules) == c for g, c in played)]
        assert len(found) == count
        assert consistent_words(decoded, WORDS, rules=rules) == found
        for symbols in ("byg", "⬛🟨🟩"):
            lines = "\n".join(f"{guess} {''.join(symbols[c] for c in colours)}" for guess, colours in played)
            assert consistent_words(lines, WORDS, rules=rules) == found


def test_nothing_played_leaves_all_words():
    assert consistent_words("", WORDS) == consistent_words("<a>", WORDS) == WORDS
    assert len(consistent_words("")) == 2250
    states = WordleEnv(WORDS, [5000]).reset()
    assert torch.equal(count_consistent(states, WORDS), torch.full((5000,), 100))
    none = count_consistent(states[:0], WORDS)
    assert (none.shape, none.dtype) == ((0,), torch.int64)


@pytest.mark.parametrize(
    "transcript",
    [
        *("crane", "crane byb", "crane bybbx", "Crane bybbb", "crane ⬛⬛⬛⬛"),
        *("<a>CRANE</a><b><g><g><b><g></s>", "<a>crane</a><b><g><g>", "<a>crane</a><b><g><g><b><x></s>"),
        *("<a>xcrane</a><b><g><g><b><g></s>", "<a>slate</a><b><g><g><b><g></s>cr?ne</a>", "<g><g><g><g><g>"),
    ],
)
def test_other_text_is_an_error(transcript):
    with pytest.raises(ValueError, match="a guess"):
        consistent_words(transcript, WORDS)


def test_guesses_without_colours_rule_nothing_out():
    transcript = "<s><a>crane</a><b><b><b><b><b></s>slopyy</a></s>slo"
    assert consistent_words(transcript, WORDS) == consistent_words("crane bbbbb", WORDS) != WORDS
    assert consistent_words(transcript + "</a></eod><|pad|>", WORDS) == consistent_words("crane bbbbb", WORDS)
