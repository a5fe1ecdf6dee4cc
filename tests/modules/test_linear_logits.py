"""The logits of a scorer as a linear function of a state."""

from __future__ import annotations

import pytest
import torch

from tests.modules.test_decoding import policy
from tests.modules.toys import rows, tiny_lm
from torchrl_lang.modules import language_actor
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer


@pytest.mark.parametrize("make", [lambda: language_actor(tiny_lm()), policy, lambda: policy(temperature=0.5)])
def test_they_have_the_scorers_distribution(make):
    scorer = RowScorer(make())
    data = rows(4, 6, longest=6)
    data["agent_mask"] = data["attention_mask"].clone()
    batch = DecisionBatch.read(data)
    states = scorer.states(batch)
    linear = scorer.linear()
    state = states[linear.key].flatten(0, 1)[batch.place]
    logits = torch.nn.functional.linear(state, linear.weight, linear.bias) / linear.temperature
    expected = logits.masked_fill(linear.forbidden, -torch.inf).log_softmax(-1)
    torch.testing.assert_close(scorer.log_softmax(states, batch.place), expected)
    assert bool(linear.forbidden.any()) == (scorer.decoder is not None)
