"""Samples in trlx's form become episodes whose rows hold the reward at the end of the last output."""

from __future__ import annotations

import pytest

from torchrl_lang.data import from_samples
from torchrl_lang.text import CharTokenizer, Turn, to_rows

TOKENIZER = CharTokenizer.from_alphabet("abc")


def test_prompts_and_outputs_alternate():
    (episode,) = from_samples([["a", "b", "c", "a"]], [2])
    assert episode.turns == (Turn("a"), Turn("b", 0.0), Turn("c"), Turn("a", 2.0))
    assert episode.terminated
    assert not episode.truncated


@pytest.mark.parametrize("sample", ["ab", ("", "ab")])
def test_without_a_prompt_the_agent_begins(sample):
    (episode,) = from_samples([sample], [0.5])
    assert episode.turns == (Turn("ab", 0.5),)


def test_the_reward_is_at_the_end_of_the_last_output():
    rows = to_rows(from_samples([("a", "bc"), ("a", "b", "c", "ab")], [0.5, -1.5]), TOKENIZER, row_length=16)
    end = TOKENIZER.control.end_of_action
    for row, reward in zip(rows, (0.5, -1.5), strict=True):
        places = row["token_reward"].nonzero().flatten().tolist()
        ends = ((row["tokens"] == end) & row["attention_mask"]).nonzero().flatten().tolist()
        assert places == ends[-1:]
        assert float(row["token_reward"].sum()) == reward


@pytest.mark.parametrize("sample", [[], ["a"], ["a", "b", "c"], ["a", 3]])
def test_other_samples_are_errors(sample):
    with pytest.raises(ValueError, match="Sample 1 must be a text or prompts and outputs in turn"):
        from_samples(["a", sample], [1.0, 1.0])


def test_every_sample_needs_a_reward():
    with pytest.raises(ValueError, match="got 2 samples and 1 rewards"):
        from_samples(["a", "b"], [1.0])


def test_rewards_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        from_samples(["a"], [float("nan")])
