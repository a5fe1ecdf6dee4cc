"""Guidance: terms by hand, and values of some tokens equal to those of the whole table."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.modules.toys import WIDTH, heads, tiny_lm
from tests.objectives.test_qsft import logits_of, uneven
from torchrl_lang import modules
from torchrl_lang.functional import filter_logits
from torchrl_lang.modules.decoding.guidance import VALUE_STATES, LikelihoodGuidance
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution
from torchrl_lang.modules.decoding.sampling import pick
from torchrl_lang.schema import ControlTokens


class Fixed(nn.Module):
    """Gives the same values whatever it reads."""

    def __init__(self, values):
        super().__init__()
        self.values = torch.tensor(values)

    def forward(self, hidden):
        return self.values


HIDDEN = torch.zeros(1, 2)
Q = Fixed([[[3.0, 1.0, -1.0], [2.0, 4.0, -2.0]]])  # the least of the two heads: 2, 1, -2
STATE = Fixed([[1.0]])  # advantages: 1, 0, -3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 2.0}, [4.0, 2.0, -4.0]),  # STATE cancels and is left out
        ({"beta": 2.0, "clip": 0.5}, [0.5, 0.0, -6.0]),
        ({"beta": 2.0, "clip": 0.0}, [0.0, 0.0, -6.0]),
        ({"beta": 2.0, "value_min": -1.0, "value_max": 1.5}, [3.0, 2.0, -2.0]),
        ({"beta": 0.8, "weighting": "sign"}, [math.log(0.8), math.log(0.2), math.log(0.2)]),
        ({"beta": 1.0, "weighting": "sign"}, [0.0, -math.inf, -math.inf]),
        ({"beta": 0.8, "weighting": "sign", "clip": -1.0}, [-1.0, math.log(0.2), math.log(0.2)]),
    ],
)
def test_terms_by_hand(options, expected):
    torch.testing.assert_close(modules.ValueGuidance(Q, STATE, **options)(HIDDEN), torch.tensor([expected]))


def test_filters_do_not_touch_the_values_and_their_verdict_stays():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    rule = NextTokenDistribution(
        temperature=10.0, top_k=2, guidance=modules.ValueGuidance(Fixed([[[0.0, 5.0, 99.0]]]), beta=1.0)
    )
    probability = rule({"logits": logits, "hidden": HIDDEN}).exp()
    torch.testing.assert_close(probability, torch.tensor([[0.2, 0.1 + 5.0, -math.inf]]).softmax(-1))


def test_forbidden_tokens_take_no_place_in_top_k():
    rule = NextTokenDistribution([0], top_k=1, vocab_size=3)
    log_prob = rule({"logits": torch.tensor([[9.0, 1.0, 2.0, 8.0]])})
    assert log_prob.exp().tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_draws_invert_the_distribution_function():
    log_prob = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).log().expand(6, 6)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24])
    assert pick(log_prob, uniform).tolist() == [1, 1, 3, 3, 4, 4]


CONTROL = ControlTokens(pad=0, end_of_action=1, forbidden=(3,))
BETA = 6.0


def one_decision(token):
    return TensorDict(
        tokens=torch.tensor([[4, 7, token]]),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        agent_mask=torch.tensor([[False, False, True]]),
        batch_size=[1],
    )


@pytest.mark.parametrize(("ratio", "options"), [(False, {}), (True, {"min_p": 0.2}), (True, {"top_k": 2})], ids=str)
def test_the_policy_is_that_of_the_formula(ratio, options):
    pi, p = (torch.from_numpy(logits_of(uneven(seed), one_decision(2)))[0, 1].softmax(-1) for seed in (2, 0))
    possible = torch.ones(12, dtype=torch.bool)
    possible[[0, 3]] = False  # what the actor may not write
    among = torch.where(possible, pi, 0.0)
    if "min_p" in options:
        possible &= among / among.max() >= 0.2
    if "top_k" in options:
        possible &= among >= among.sort().values[-2]
    value = (p / pi).clamp_max(1.0) if ratio else p
    expected = torch.where(possible, pi.log() + BETA * value, -math.inf).log_softmax(-1)
    guidance = LikelihoodGuidance(uneven(0), beta=BETA, ratio=ratio)
    actor = modules.UtteranceActor(uneven(2), CONTROL, 4, guidance=guidance, **options)
    for token in range(12):
        found = modules.row_log_prob(actor, one_decision(token))[0, 2]
        torch.testing.assert_close(found, expected[token].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [False, True])
def test_some_tokens_have_the_values_of_all(ratio):
    guidance = LikelihoodGuidance(uneven(0), beta=BETA, ratio=ratio)
    generator = torch.Generator().manual_seed(0)
    states = {name: torch.randn(3, n, generator=generator) for name, n in (("value_hidden", 16), ("logits", 12))}
    tokens = torch.tensor([[1, 5], [2, 2], [0, 11]])
    torch.testing.assert_close(guidance.term(states, tokens), guidance.term(states).gather(-1, tokens))


N, V = 6, 2600

GUIDED = [
    {"beta": 2.0},
    {"beta": 2.0, "value_min": -0.4, "value_max": 0.3},
    {"beta": 2.0, "clip": 0.1},
    {"beta": 0.8, "weighting": "sign"},
    {"beta": 1.0, "weighting": "sign"},  # tokens without advantage are out, all of them in some rows
    {"beta": 2.0, "include_logits": False},
]
FILTERS = [{"top_k": 4, "top_p": 0.6}, {"top_k": 1}, {"min_p": 0.1}, {"top_k": 5, "min_p": 0.3, "temperature": 0.6}]


def make_states(prefix=""):
    torch.manual_seed(1)
    states = {"logits": 2 * torch.randn(N, V)}
    return states | {f"{prefix}hidden": torch.randn(N, WIDTH)}


def by_the_whole_table(rule, states):
    """The rule's definition, without a thought of cost."""
    filters = {"top_k": rule.top_k, "top_p": rule.top_p, "min_p": rule.min_p}
    logits = filter_logits(rule.allowed(states["logits"]), temperature=rule.temperature, **filters)
    guidance = rule.guidance
    base = logits if guidance.include_logits else logits.masked_fill(logits.isfinite(), 0.0)
    guided = base + guidance.term(states)
    if guidance.weighting == "sign":
        guided = torch.where(guided.isneginf().all(-1, keepdim=True), base, guided)
    return guided.log_softmax(-1)


def assert_same(rule, states):
    torch.testing.assert_close(rule(states), by_the_whole_table(rule, states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("options", "filters"), list(itertools.product(GUIDED, FILTERS)), ids=str)
def test_same_numbers_as_the_whole_table(options, filters):
    both = heads(vocab_size=V, kind="deep" if "clip" in options else "mlp")
    guidance = modules.ValueGuidance(*both, **options)
    rule = NextTokenDistribution([3, 11], vocab_size=V - 40, **filters, guidance=guidance)
    states = make_states()
    states["logits"][0, [3, 11, V - 1]] = 50.0  # forbidden ones would be first
    assert_same(rule, states)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_table_is_not_built_and_without_top_k_it_is(wrapped):
    (q, v), states, calls = heads(vocab_size=V), make_states(), []
    q.register_forward_hook(lambda *args: calls.append(1))
    guidance = modules.ValueGuidance(modules.qvalue_module(q) if wrapped else q, v, beta=1.0, clip=0.0)
    NextTokenDistribution(top_k=5, top_p=0.9, guidance=guidance)(states)
    assert not calls
    for filters in ({"top_p": 0.9}, {}, {"top_k": 50}):  # the last: too many beside the vocabulary
        NextTokenDistribution(**filters, guidance=guidance)(states)
        assert len(calls) == 1
        assert_same(NextTokenDistribution(**filters, guidance=guidance), states)
        calls.clear()


def test_tied_values_and_a_trunk_of_their_own():
    trunk = modules.language_actor(tiny_lm(vocab_size=V))[0].module
    head = modules.TiedQValueHead(WIDTH, trunk.model.get_input_embeddings())
    with torch.no_grad():
        head.out_weight.mul_(60)
    guidance = modules.ValueGuidance(head, heads(vocab_size=V)[1], beta=2.0, clip=0.2, value_trunk=trunk)
    assert_same(NextTokenDistribution(top_k=5, guidance=guidance), make_states(VALUE_STATES))


@pytest.mark.parametrize("tied", [3, 30])  # a few beside the k-th fit among the candidates, many do not
def test_all_that_tie_with_the_last_one_are_kept(tied):
    states = make_states()
    states["logits"][1] = -5.0
    states["logits"][1, 100 : 100 + 4 + tied] = torch.tensor([9.0] * 4 + [7.0] * tied)
    rule = NextTokenDistribution(top_k=5, guidance=modules.ValueGuidance(heads(vocab_size=V)[0], beta=2.0))
    assert_same(rule, states)
    assert rule(states)[1].isfinite().sum() == 4 + tied
