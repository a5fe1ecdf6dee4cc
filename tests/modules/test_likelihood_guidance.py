"""A second language model's probabilities as values: the policy by its formula, and one result however it decodes."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from tests.objectives.test_qsft import logits_of, uneven
from torchrl_lang.modules import LikelihoodGuidance, UtteranceActor, row_log_prob
from torchrl_lang.schema import ControlTokens

CONTROL = ControlTokens(pad=0, end_of_action=1, forbidden=(3,))
BETA = 6.0


def one_decision(token):
    return TensorDict(
        tokens=torch.tensor([[4, 7, token]]),
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        agent_mask=torch.tensor([[False, False, True]]),
        batch_size=[1],
    )


@pytest.mark.parametrize("ratio", [False, True])
@pytest.mark.parametrize("options", [{}, {"min_p": 0.2}, {"top_k": 2}], ids=str)
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
    actor = UtteranceActor(uneven(2), CONTROL, 4, guidance=guidance, **options)
    for token in range(12):
        found = row_log_prob(actor, one_decision(token))[0, 2]
        torch.testing.assert_close(found, expected[token].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [False, True])
def test_cached_decoding_is_uncached_decoding(ratio):
    rows = TensorDict(
        tokens=torch.tensor([[4, 7, 5, 0], [6, 4, 8, 9]]),
        attention_mask=torch.tensor([[True, True, True, False], [True] * 4]),
        batch_size=[2],
    )
    found = [
        UtteranceActor(
            uneven(2),
            CONTROL,
            6,
            guidance=LikelihoodGuidance(uneven(0), beta=BETA, ratio=ratio),
            method="greedy",
            cached=cached,
        )(rows.clone())
        for cached in (True, False)
    ]
    assert torch.equal(found[0]["action"], found[1]["action"])
    torch.testing.assert_close(found[0]["token_log_prob"], found[1]["token_log_prob"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [False, True])
def test_some_tokens_have_the_values_of_all(ratio):
    guidance = LikelihoodGuidance(uneven(0), beta=BETA, ratio=ratio)
    generator = torch.Generator().manual_seed(0)
    states = {
        "value_hidden": torch.randn(3, 16, generator=generator),
        "logits": torch.randn(3, 12, generator=generator),
    }
    tokens = torch.tensor([[1, 5], [2, 2], [0, 11]])
    torch.testing.assert_close(guidance.term(states, tokens), guidance.term(states).gather(-1, tokens))
