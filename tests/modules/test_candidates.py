"""Under a top-k that is small beside the vocabulary only what it keeps is gone into, with the same outcome."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from tests.modules.toys import WIDTH, tiny_lm
from torchrl_lang.functional import filter_logits
from torchrl_lang.modules import QValueHead, TiedQValueHead, ValueGuidance, ValueHead, language_actor, qvalue_module
from torchrl_lang.modules.decoding.guidance import VALUE_STATES
from torchrl_lang.modules.decoding.next_token import NextTokenDistribution

N, V = 6, 2600

GUIDED = [
    {"beta": 2.0},
    {"beta": 2.0, "value_min": -0.4, "value_max": 0.3},
    {"beta": 2.0, "clip": 0.1},
    {"beta": 0.8, "weighting": "sign"},
    {"beta": 1.0, "weighting": "sign"},  # tokens without advantage are out, all of them in some rows
    {"beta": 2.0, "include_logits": False},
]
FILTERS = [{"top_k": 5}, {"top_k": 4, "top_p": 0.6}, {"top_k": 1}, {"top_k": 5, "temperature": 0.6}]
FILTERS += [{"min_p": 0.1}, {"top_k": 5, "min_p": 0.3}]


def make_heads(kind="mlp"):
    torch.manual_seed(0)
    q, v = QValueHead(WIDTH, V, kind=kind), ValueHead(WIDTH, kind=kind)
    with torch.no_grad():
        q.out_weight.mul_(60)
        v.out_weight.mul_(60)
    return q, v


def make_states(prefix=""):
    torch.manual_seed(1)
    states = {"logits": 2 * torch.randn(N, V)}
    return states | {prefix + name: torch.randn(N, WIDTH) for name in ("hidden", "hidden_pre_norm")}


def by_the_whole_table(rule, states):
    """The rule's definition, without a thought of cost."""
    filters = {"top_k": rule.top_k, "top_p": rule.top_p, "min_p": rule.min_p}
    logits = filter_logits(rule.allowed(states["logits"]), temperature=rule.temperature, **filters)
    guidance = rule.guidance
    if guidance is None:
        return logits.log_softmax(-1)
    base = logits if guidance.include_logits else logits.masked_fill(logits.isfinite(), 0.0)
    guided = base + guidance.term(states)
    if guidance.weighting == "sign":
        guided = torch.where(guided.isneginf().all(-1, keepdim=True), base, guided)
    return guided.log_softmax(-1)


def assert_same(rule, states):
    torch.testing.assert_close(rule(states), by_the_whole_table(rule, states), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["mlp", "residual"])
@pytest.mark.parametrize(("options", "filters"), list(itertools.product(GUIDED, FILTERS)), ids=str)
def test_same_numbers_as_the_whole_table(options, filters, kind):
    rule = NextTokenDistribution(
        [3, 11], vocab_size=V - 40, **filters, guidance=ValueGuidance(*make_heads(kind), **options)
    )
    states = make_states()
    states["logits"][0, [3, 11, V - 1]] = 50.0  # forbidden ones would be first
    assert_same(rule, states)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_table_is_not_built_and_without_top_k_it_is(wrapped):
    q, v = make_heads()
    calls = []
    q.register_forward_hook(lambda *args: calls.append(1))
    guidance = ValueGuidance(qvalue_module(q) if wrapped else q, v, beta=1.0, clip=0.0)
    states = make_states()
    NextTokenDistribution(top_k=5, top_p=0.9, guidance=guidance)(states)
    assert not calls
    for filters in ({"top_p": 0.9}, {}, {"top_k": 50}):  # the last: too many beside the vocabulary
        rule = NextTokenDistribution(**filters, guidance=guidance)
        before = len(calls)
        rule(states)
        assert len(calls) == before + 1
        assert_same(rule, states)


def test_tied_values_and_a_trunk_of_their_own():
    trunk = language_actor(tiny_lm(vocab_size=V))[0].module
    head = TiedQValueHead(WIDTH, trunk.model.get_input_embeddings())
    with torch.no_grad():
        head.out_weight.mul_(60)
    guidance = ValueGuidance(head, make_heads()[1], beta=2.0, clip=0.2, value_trunk=trunk)
    assert_same(NextTokenDistribution(top_k=5, guidance=guidance), make_states(VALUE_STATES))


def test_foreign_networks_give_their_whole_table():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = make_heads()[0]

        def forward(self, hidden):
            return self.head(hidden) + 0.1

    for network in (Foreign(), TensorDictModule(Foreign(), in_keys=["hidden"], out_keys=["action_value"])):
        assert_same(NextTokenDistribution(top_k=5, guidance=ValueGuidance(network, beta=2.0)), make_states())


@pytest.mark.parametrize("tied", [3, 30])  # a few beside the k-th fit among the candidates, many do not
def test_all_that_tie_with_the_last_one_are_kept(tied):
    states = make_states()
    states["logits"][1] = -5.0
    states["logits"][1, 100 : 100 + 4 + tied] = torch.tensor([9.0] * 4 + [7.0] * tied)
    rule = NextTokenDistribution(top_k=5, guidance=ValueGuidance(make_heads()[0], beta=2.0))
    assert_same(rule, states)
    assert rule(states)[1].isfinite().sum() == 4 + tied


def test_gradients_flow_as_through_the_whole_table():
    q, _ = make_heads()
    rule, states = NextTokenDistribution(top_k=5, guidance=ValueGuidance(q, beta=2.0)), make_states()
    states = {name: value.requires_grad_() for name, value in states.items()}
    leaves = [states["logits"], states["hidden"], *q.parameters()]
    ours, expected = (
        torch.autograd.grad(log_prob.amax(-1).sum(), leaves)
        for log_prob in (rule(states), by_the_whole_table(rule, states))
    )
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_advantages_of_some_tokens():
    guidance, states = ValueGuidance(*make_heads(), beta=1.0), make_states()
    tokens = torch.randint(V, (N, 4))
    torch.testing.assert_close(
        guidance.advantage(states, tokens), guidance.advantage(states).gather(-1, tokens), rtol=1e-5, atol=1e-5
    )
