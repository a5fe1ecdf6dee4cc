"""Heads for values of utterances: shapes, and that they are saved with models and agents."""

from __future__ import annotations

import pytest
import torch

from tests.modules.toys import WIDTH, tiny_lm
from torchrl_lang.modules import (
    UtteranceActor,
    UtteranceQValueHead,
    UtteranceValueGuidance,
    language_actor,
    load_agent,
    qvalue_module,
    save_agent,
)
from torchrl_lang.text import CharTokenizer


def make_head(**options):
    torch.manual_seed(0)
    head = UtteranceQValueHead(WIDTH, **options)
    torch.nn.init.normal_(head.out_weight)
    return head


@pytest.mark.parametrize("kind", ["mlp", "residual"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_one_number_for_each_head(kind, shape):
    head, hidden = make_head(n_heads=3, kind=kind), torch.randn(*shape, WIDTH)
    assert head(hidden).shape == (*shape, 3)
    torch.testing.assert_close(head(hidden).reshape(-1, 3), head.outputs(hidden.reshape(-1, WIDTH))[..., 0].T)
    module = qvalue_module(head)
    assert (module.in_keys, module.out_keys) == ([head.in_key], ["utterance_value"])


def test_a_saved_agent_ranks_by_the_same_values(tmp_path):
    tokenizer = CharTokenizer.from_alphabet("abc")
    lm, ranking = tiny_lm(vocab_size=tokenizer.vocab_size), {"end_value_weight": 2.0, "log_prob_weight": 0.5}
    guidance = UtteranceValueGuidance(make_head())
    policy = UtteranceActor(
        language_actor(lm), tokenizer.control, 4, guidance=guidance, method="best_of", seed=1, **ranking
    )
    loaded = load_agent(save_agent(tmp_path / "agent", policy, tokenizer), seed=1).policy
    assert isinstance(loaded.decoder.rule.guidance, UtteranceValueGuidance)
    tokens = torch.full((5, 6), tokenizer.control.begin_action)
    attention = torch.arange(6).expand(5, 6) < 1
    assert torch.equal(
        *(actor.decoder.generate(tokens, attention, method="best_of").action for actor in (policy, loaded))
    )
