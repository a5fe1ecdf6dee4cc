"""Rewards of several tokens, against plain loops over rewards and their tokens."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.algorithm_distillation.language.test_language_metrics import ranks
from torchrl_lang.algorithm_distillation.language import (
    Bins,
    BlockTemplate,
    Levels,
    TextHistory,
    TokenKind,
    pack_blocks,
    reward_accuracy,
)
from torchrl_lang.algorithm_distillation.language.reward_words import RewardWords
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.text import CharTokenizer, word_tokenizer

VALUES = [-10.0, -1.0006, -1.0005, -1.0, 0.0, 3.0]
"""The digits of -1.0 are the first ones of others."""


@pytest.fixture
def tokenizer():
    return word_tokenizer([], symbols=BlockTemplate().vocabulary())


def packed(tokenizer, template=None, values=VALUES, row_length=150):
    draw = np.random.default_rng(0)
    rewards = [*draw.choice(values, 13, p=[0.1, 0.1, 0.1, 0.3, 0.3, 0.1]), 3.0]
    records = [TextHistory(query=f"q{at}", response="r", rewards=(float(each),)) for at, each in enumerate(rewards)]
    return pack_blocks(records, template or BlockTemplate(), tokenizer, row_length).rows, np.array(rewards)


def actor_for(tokenizer, length):
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 16, "heads": 2, "initializer_range": 0.5}
    return language_actor(causal_lm(vocab_size=tokenizer.vocab_size, max_length=length, **sizes))


def plain_probabilities(actor, context, sequences):
    """Of each sequence of tokens after a context, if nothing but these sequences may be written; in plain loops."""
    found = []
    for sequence in sequences:
        probability = 1.0
        for place, token in enumerate(sequence):
            following = {each[place] for each in sequences if each[:place] == sequence[:place]}
            if len(following) == 1:
                continue
            tokens = torch.tensor([context + list(sequence[:place])])
            row = {"tokens": tokens, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}
            with torch.no_grad():
                odds = actor.get_dist(TensorDict(row, [1])).probs[0, -1].double()
            probability *= float(odds[token] / odds[sorted(following)].sum())
        found.append(probability)
    return np.array(found)


@pytest.mark.slow
@pytest.mark.parametrize("is_full", [False, True])
def test_rewards_in_digits_are_predicted_as_in_plain_loops(tokenizer, is_full):
    """Also where a row has no room for the longest reward in place of its last one."""
    rows, rewards = packed(tokenizer)
    row_length = 150
    if is_full:
        row_length = 1 + int((rows["attention_mask"].sum(-1) - 1).sum())
        rows, rewards = packed(tokenizer, row_length=row_length)
        assert rows["attention_mask"].all()
    actor = actor_for(tokenizer, row_length + 8)
    sequences = [tuple(tokenizer.encode(f" {value}") + tokenizer.encode("\n\n")[:1]) for value in VALUES]
    best, mean = [], []
    for row in rows:
        ids, kind = row["tokens"].tolist(), row["token_kind"].tolist()
        for place in range(1, len(ids)):
            if kind[place] == TokenKind.REWARD != kind[place - 1]:
                probability = plain_probabilities(actor, ids[:place], sequences)
                assert probability.sum() == pytest.approx(1)
                best.append(VALUES[probability.argmax()])
                mean.append(float(probability @ VALUES))
    assert len(best) == len(rewards) == 14
    place = [VALUES.index(value) for value in rewards]
    chosen = np.array([VALUES.index(value) for value in best])
    share = np.bincount(place, minlength=6) / 14
    expected = {
        "exact": np.mean(np.array(best) == rewards),
        "within_one": np.mean(abs(chosen - place) <= 1),
        "rank_correlation": np.corrcoef(ranks(np.array(mean)), ranks(rewards))[0, 1],
        "squared_error": np.mean((rewards - mean) ** 2),
        "constant_exact": share.max(),
        "constant_within_one": max(share[max(0, at - 1) : at + 2].sum() for at in range(6)),
        "constant_squared_error": rewards.var(),
    }
    template = BlockTemplate()
    found = reward_accuracy(actor, rows, template, tokenizer, values=VALUES, chunk=2)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found == pytest.approx(reward_accuracy(actor, rows, template, tokenizer, values=VALUES), abs=1e-5)


def test_digits_and_words_of_the_same_rewards_are_counted_the_same(tokenizer):
    """The figures of a constant prediction do not depend on how rewards are written."""
    rows, _ = packed(tokenizer)
    digits = reward_accuracy(actor_for(tokenizer, 160), rows, BlockTemplate(), tokenizer, values=VALUES)
    template = BlockTemplate(Levels(VALUES, outside="nearest"))  # float32 rounds -1.0005
    words = word_tokenizer([], symbols=template.vocabulary())
    for own in (words, tokenizer):  # one token a reward, or several of the same words
        rows, _ = packed(own, template)
        found = reward_accuracy(actor_for(own, 160), rows, template, own)
        assert {key: found[key] for key in found if key.startswith("constant")} == pytest.approx(
            {key: digits[key] for key in digits if key.startswith("constant")}
        )
    assert len(rows["token_kind"][0].unique()) == 3


def test_the_model_is_asked_only_where_rewards_differ():
    tokenizer = CharTokenizer.from_alphabet("\n -.0123456789")
    words = RewardWords(BlockTemplate(), tokenizer, [-1.0, 0.0])
    assert list(words.branches) == [tuple(tokenizer.encode(" "))]
    words = RewardWords(BlockTemplate(), tokenizer, [1.0, 1.05])
    (prefix, following), = words.branches.items()  # fmt: skip
    assert (tokenizer.decode(prefix), tokenizer.decode(following)) == (" 1.0", "\n5")
    assert words.longest == len(" 1.05\n")


def test_impossible_rewards_raise(tokenizer):
    rows, _ = packed(tokenizer)
    actor = actor_for(tokenizer, 160)
    with pytest.raises(ValueError, match="finitely many rewards: give the template Bins or Levels, or the rewards"):
        reward_accuracy(actor, rows, BlockTemplate(), tokenizer)
    with pytest.raises(ValueError, match="has: give all rewards as values, and the tokenizer"):
        reward_accuracy(actor, rows, BlockTemplate(), tokenizer, values=VALUES[:-1])
    with pytest.raises(ValueError, match="finitely many rewards already: leave values out"):
        reward_accuracy(actor, rows, BlockTemplate(Bins(0, 1, 3)), tokenizer, values=VALUES)
    with pytest.raises(ValueError, match="The rows have no reward"):
        reward_accuracy(actor, rows[:0], BlockTemplate(), tokenizer, values=VALUES)
