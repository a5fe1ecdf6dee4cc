"""The report on learned values, on values of which all is known."""

import math

import pytest
import torch
from torch import nn

from torchrl_lang.evaluation import value_report
from torchrl_lang.evaluation.value_report import ValueReport
from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor
from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows

TOKENIZER = CharTokenizer.from_alphabet("abcdefgh")
CONTROL = TOKENIZER.control


@pytest.fixture
def actor():
    torch.manual_seed(0)
    return language_actor(causal_lm(vocab_size=TOKENIZER.vocab_size, layers=1, width=16, heads=2, max_length=24))


def episodes(n=32, seed=0):
    """Episodes of one to three utterances, each with a reward and a reply."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(n):
        turns = []
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            word = "".join("abcdefgh"[i] for i in torch.randint(0, 8, (2,), generator=generator).tolist())
            turns += [Turn(word, reward=float(torch.randn((), generator=generator))), Turn("a")]
        out.append(Episode(turns, True))
    return to_rows(out, TOKENIZER, 24)


class KnownValues(nn.Module):
    """Values of the decisions in the order in which they are asked for; of the last positions ``last``."""

    def __init__(self, values, vocabulary=None, last=0.0):
        super().__init__()
        self.values, self.vocabulary, self.last = values, vocabulary, last

    def forward(self, hidden):
        values = self.values if len(hidden) == len(self.values) else torch.full((len(hidden),), self.last)
        return values[:, None] if self.vocabulary is None else values[:, None, None].repeat(1, 1, self.vocabulary)


def known(values, last=0.0):
    return KnownValues(values, TOKENIZER.vocab_size), KnownValues(values, last=last)


def returns_of(rows, gamma, turn_gamma):
    """The returns to go by the definition: a loop over the tokens of each row."""
    out = []
    for row in rows:
        later, found = 0.0, []
        tokens, rewards = (row[key][row["agent_mask"]].flip(0).tolist() for key in ("tokens", "token_reward"))
        for token, reward in zip(tokens, rewards, strict=True):
            later = reward + (turn_gamma if token == CONTROL.end_of_action else gamma) * later
            found.append(later)
        out += found[::-1]
    return torch.tensor(out)


@pytest.mark.parametrize(("slope", "shift", "clocks"), [(1.0, 0.0, (0.9, 0.5)), (-2.0, 3.0, (1.0, 1.0))])
def test_values_that_are_a_linear_function_of_the_returns(actor, slope, shift, clocks):
    rows, returns = episodes(), returns_of(episodes(), *clocks)
    values = slope * returns + shift
    report = value_report(actor, *known(values), rows, CONTROL, gamma=clocks[0], turn_gamma=clocks[1])
    assert report.tokens == int(rows["agent_mask"].sum()) == len(returns)
    assert report.qvalue_correlation == pytest.approx(math.copysign(1, slope), abs=1e-5)
    assert report.value_correlation == pytest.approx(math.copysign(1, slope), abs=1e-5)
    assert report.qvalue_slope == pytest.approx(1 / slope, abs=1e-5)
    assert report.qvalue_bias == pytest.approx(float((values - returns).mean()), abs=1e-4)
    if slope == 1.0:
        assert report.qvalue_fit == pytest.approx(1.0, abs=1e-5)


def test_constant_values_have_no_correlation(actor):
    report = value_report(actor, *known(torch.ones(int(episodes()["agent_mask"].sum()))), episodes(), CONTROL)
    assert math.isnan(report.qvalue_correlation)
    assert report.as_dict()["qvalue_correlation"] is None
    assert not report.ready  # constant values do not explain the targets, which contain rewards
    assert report.as_dict()["summary"] == str(report)


def test_the_end_of_a_truncated_row_counts_as_its_value(actor):
    """One utterance without reward, cut off: its return is the value of the last position, 5."""
    rows = to_rows([Episode([Turn("ab", reward=0.0)], False), Episode([Turn("cd", reward=1.0)], True)], TOKENIZER, 24)
    report = value_report(actor, *known(torch.arange(6.0), last=5.0), rows, CONTROL, turn_gamma=1.0)
    # Returns 5, 5, 5 and 1, 1, 1 against Q of 0 to 5: the mean of Q is 2.5, that of the returns 3.
    assert report.qvalue_bias == pytest.approx(-0.5)
    row, value = rows[:1], ValueHead(16)
    last = value(actor[0](row.clone())["hidden"][:, int(row["attention_mask"].sum()) - 1])
    report = value_report(actor, known(torch.zeros(3))[0], value, row, CONTROL, turn_gamma=1.0)
    assert report.qvalue_bias == pytest.approx(-last.item(), rel=1e-4)


def test_untried_tokens_are_those_that_the_model_hardly_ever_writes(actor):
    head = actor[1].module
    with torch.no_grad():
        head.weight.zero_()  # the same distribution everywhere
    head.bias = nn.Parameter(-10.0 * torch.eye(TOKENIZER.vocab_size)[3])
    for token, rate in ((2, 0.0), (3, 1.0), (CONTROL.pad, 0.0)):  # no control token can be written
        prefers = QValueHead(16, TOKENIZER.vocab_size)
        nn.init.zeros_(prefers.out_weight)
        prefers.out_bias.data[:] = torch.eye(TOKENIZER.vocab_size)[token]
        assert value_report(actor, prefers, ValueHead(16), episodes(), CONTROL).untried_rate == rate


def test_values_are_ready_that_fit_and_prefer_what_was_tried():
    assert not ValueReport(9, 0.5, 0.1, math.nan, 1.0, 0.0, 0.0).ready
    assert ValueReport(9, -0.2, 0.1, 0.9, 1.0, 0.0, 0.03).ready
    report = ValueReport(9, 0.5, 0.1, 0.2, 1.0, 0.0, 0.5)
    assert "fit 0.20 (at least 0.5), 50 % untried" in str(report)


def test_batches_do_not_matter_and_rows_without_a_token_of_the_agent_are_refused(actor):
    heads, rows = (QValueHead(16, TOKENIZER.vocab_size), ValueHead(16)), episodes()
    whole, parts = (value_report(actor, *heads, rows, CONTROL, batch_size=n).scalars() for n in (256, 5))
    assert parts == pytest.approx(whole, rel=1e-4)
    with pytest.raises(ValueError, match="32 rows have no token of the agent"):
        value_report(actor, *heads, rows.set("agent_mask", torch.zeros_like(rows["agent_mask"])), CONTROL)
