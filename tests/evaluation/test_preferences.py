"""Preference rates, advantages of texts and summaries over seeds, by hand."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from torchrl_lang.evaluation import (
    Comparison,
    format_seed_table,
    over_seeds,
    preference_rates,
    row_advantages,
    text_advantages,
)
from torchrl_lang.evaluation.tables import _quantile
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

TOKENIZER = CharTokenizer.from_alphabet("abcd")
CONTROL = TOKENIZER.control
SIZE = TOKENIZER.vocab_size
A, B, C, D = TOKENIZER.encode("abcd")


class ShowTokens(nn.Module):
    """A trunk whose state is the last token and the number of tokens read."""

    def forward(self, tokens, attention_mask):
        return torch.stack([tokens, attention_mask.cumsum(-1)], -1).float()


class Table(nn.Module):
    """Two heads: the first is ``10 * last token + next token``, the second larger."""

    def forward(self, hidden):
        first = 10 * hidden[:, :1] + torch.arange(SIZE)
        return torch.stack([first, first + 1], 1)


class Count(nn.Module):
    """The number of tokens read."""

    def forward(self, hidden):
        return hidden[:, 1:]


def module(net, key):
    return TensorDictModule(net, in_keys=["hidden"], out_keys=[key])


@pytest.fixture
def actor():
    lm = causal_lm(vocab_size=SIZE, layers=1, width=8, heads=2, max_length=16)
    actor = language_actor(lm)
    actor.module[0] = TensorDictModule(ShowTokens(), in_keys=["tokens", "attention_mask"], out_keys=["hidden"])
    return actor


def test_preference_rates_by_hand(actor):
    short, long = torch.tensor([CONTROL.begin_action]), torch.tensor([CONTROL.begin_action, D, C])
    pairs = [
        Comparison(short, torch.tensor([B, A]), torch.tensor([A, D])),  # b > a; 10b + a > 10a + d; end after a, d
        Comparison(long, torch.tensor([C, C]), torch.tensor([C, B])),  # equal; c > b; end after c > b
    ]
    qvalue = module(Table(), "action_value")
    for batch_size in (1, 256):
        rates = preference_rates(actor, qvalue, pairs, CONTROL, batch_size=batch_size)
        assert rates.tolist() == [0.75, 1.0, 0.5]


def test_preference_rates_need_pairs_of_one_length(actor):
    qvalue, state = module(Table(), "action_value"), torch.tensor([1])
    with pytest.raises(ValueError, match=r"at least one pair, got 0 pairs"):
        preference_rates(actor, qvalue, [], CONTROL)
    with pytest.raises(ValueError, match=r"got 1 pairs of lengths \[1, 2\]"):
        preference_rates(actor, qvalue, [Comparison(state, torch.tensor([A]), torch.tensor([A, B]))], CONTROL)


def rows():
    turns = [Turn("ab", 0.0), Turn("c"), Turn("ab", 0.0)]
    return to_rows([Episode(turns, True), Episode([Turn("d", 1.0)], True)], TOKENIZER, 16)


def expected(tokens, place):
    """Least Q minus V of a token."""
    return 10 * tokens[place - 1] + tokens[place] - place


def test_row_advantages_by_hand(actor):
    data = rows()
    found = row_advantages(actor, module(Table(), "action_value"), module(Count(), "state_value"), data)
    for row, mask, tokens in zip(found, data["agent_mask"], data["tokens"].tolist(), strict=True):
        assert mask.any()
        for place, value in enumerate(row.tolist()):
            assert value == (expected(tokens, place) if mask[place] else 0)


def test_text_advantages_are_means_of_sums_without_ends(actor):
    data, heads = rows(), (module(Table(), "action_value"), module(Count(), "state_value"))
    found = {one.text: one for one in text_advantages(actor, *heads, data, TOKENIZER, batch_size=1)}
    tokens = data["tokens"].tolist()
    first, second = (i for i, token in enumerate(tokens[0]) if token == A)
    sums = [expected(tokens[0], place) + expected(tokens[0], place + 1) for place in (first, second)]
    assert found["ab"].advantage == pytest.approx(statistics.mean(sums))
    assert (found["ab"].count, found["d"].count, len(found)) == (2, 1, 2)
    single = text_advantages(actor, *heads, data, TOKENIZER, ngram=1)
    assert {one.text: one.count for one in single} == {"a": 2, "b": 2, "d": 1}
    assert [one.advantage for one in single] == sorted((one.advantage for one in single), reverse=True)
    assert [one.text for one in text_advantages(actor, *heads, data, TOKENIZER, ngram=2, min_count=2)] == ["ab"]
    assert text_advantages(actor, *heads, data, TOKENIZER, ngram=3) == []
    with pytest.raises(ValueError, match="ngram must be positive"):
        text_advantages(actor, *heads, data, TOKENIZER, ngram=0)


def test_over_seeds():
    values = [0.2, 0.5, 0.8, 0.9]
    summary = over_seeds("x", values)
    error = statistics.stdev(values) / 2
    assert summary.mean == pytest.approx(0.6)
    assert summary.error == pytest.approx(error)
    assert summary.interval == pytest.approx((0.6 - 3.1824 * error, 0.6 + 3.1824 * error))
    assert over_seeds("x", [1.0]).interval is None
    assert "-" in format_seed_table([over_seeds("x", [1.0])])
    for bad in ([], [math.nan]):
        with pytest.raises(ValueError, match="x needs at least one value"):
            over_seeds("x", bad)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (10, 2.228), (11, 2.201), (20, 2.086), (60, 2.000)])
def test_quantiles_of_students_distribution(freedom, quantile):
    assert _quantile(freedom) == pytest.approx(quantile, abs=6e-4)
