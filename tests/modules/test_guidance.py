from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tests.modules.toys import WIDTH, heads
from torchrl_lang.functional import filter_logits
from torchrl_lang.modules import ValueGuidance
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.decoding.sampling import pick


class Fixed(nn.Module):
    """Gives the same values whatever it reads."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, hidden):
        return self.values


class NeverCalled(nn.Module):
    def forward(self, hidden):
        raise AssertionError("this should not have been evaluated")


HIDDEN = torch.zeros(1, 2)
Q = Fixed([[[3.0, 1.0, -1.0], [2.0, 4.0, -2.0]]])  # the least of the two heads: 2, 1, -2
V = Fixed([[1.0]])  # advantages: 1, 0, -3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 2.0}, [4.0, 2.0, -4.0]),  # V cancels and is left out
        ({"beta": 2.0, "clip": 0.5}, [0.5, 0.0, -6.0]),
        ({"beta": 2.0, "clip": 0.0}, [0.0, 0.0, -6.0]),
        ({"beta": 2.0, "value_min": -1.0, "value_max": 1.5}, [3.0, 2.0, -2.0]),
        ({"beta": 0.8, "weighting": "sign"}, [math.log(0.8), math.log(0.2), math.log(0.2)]),
        ({"beta": 1.0, "weighting": "sign"}, [0.0, -math.inf, -math.inf]),
        ({"beta": 0.8, "weighting": "sign", "clip": -1.0}, [-1.0, math.log(0.2), math.log(0.2)]),
    ],
)
def test_terms_by_hand(options, expected):
    torch.testing.assert_close(ValueGuidance(Q, V, **options)(HIDDEN), torch.tensor([expected]))


def test_the_value_is_not_evaluated_where_it_cancels():
    ValueGuidance(Q, NeverCalled(), beta=1.0)(HIDDEN)
    with pytest.raises(AssertionError, match="should not have been"):
        ValueGuidance(Q, NeverCalled(), beta=1.0, clip=0.0)(HIDDEN)


def test_exp_without_clip_is_a_tilt_by_q_and_deaf_to_v():
    torch.manual_seed(0)
    q, v = heads()
    hidden, logits = torch.randn(9, WIDTH), torch.randn(9, 12)
    states = {"hidden": hidden, "logits": logits}
    log_prob = NextTokenDistribution(temperature=0.7, top_k=7, guidance=ValueGuidance(q, v, beta=3.0))(states)
    filtered = filter_logits(logits, temperature=0.7, top_k=7)
    torch.testing.assert_close(log_prob, (filtered + 3.0 * q(hidden).amin(1)).log_softmax(-1))
    with_v = (filtered + 3.0 * (q(hidden).amin(1) - v(hidden))).log_softmax(-1)
    torch.testing.assert_close(log_prob, with_v, atol=1e-5, rtol=1e-5)


def test_filters_do_not_touch_the_values_and_their_verdict_stays():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    rule = NextTokenDistribution(
        temperature=10.0, top_k=2, guidance=ValueGuidance(Fixed([[[0.0, 5.0, 99.0]]]), beta=1.0)
    )
    probability = rule({"logits": logits, "hidden": HIDDEN}).exp()
    torch.testing.assert_close(probability, torch.tensor([[0.2, 0.1 + 5.0, -math.inf]]).softmax(-1))


def test_where_no_token_has_an_advantage_the_language_model_decides():
    guidance = ValueGuidance(Q, Fixed([[50.0]]), beta=1.0, weighting="sign")
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    log_prob = NextTokenDistribution([2], guidance=guidance)({"logits": logits, "hidden": HIDDEN})
    torch.testing.assert_close(log_prob, torch.tensor([[1.0, 2.0, -math.inf]]).log_softmax(-1))


def test_forbidden_tokens_take_no_place_in_top_k():
    rule = NextTokenDistribution([0], top_k=1, vocab_size=3)
    log_prob = rule({"logits": torch.tensor([[9.0, 1.0, 2.0, 8.0]])})
    assert log_prob.exp().tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_logits_are_left_as_they_were():
    logits = torch.randn(3, 5)
    before = logits.clone()
    NextTokenDistribution([0], vocab_size=4, temperature=0.5, top_p=0.5)({"logits": logits})
    assert torch.equal(logits, before)


def test_draws_invert_the_distribution_function():
    log_prob = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log().expand(6, 6)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24])
    assert pick(log_prob, uniform).tolist() == [1, 1, 3, 3, 4, 4]
