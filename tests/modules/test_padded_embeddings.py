"""A model with more embeddings than its tokenizer has ids: acting, scoring and training see the tokenizer's alone."""

from __future__ import annotations

import pytest
import torch

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.functional import decision_mask
from torchrl_lang.modules import (
    RowTokenActor,
    UtteranceActor,
    ValueHead,
    causal_lm,
    language_actor,
    row_log_prob,
    value_module,
)
from torchrl_lang.objectives import PPOLoss


@pytest.fixture(params=["gpt2", "qwen2"])
def played(request):
    """A policy with default arguments, and the rows of its games."""
    torch.manual_seed(0)
    env = CorridorEnv(4, start=0, max_turns=8, batch_size=[64], seed=0)
    shape = {"vocab_size": env.tokenizer.vocab_size + 53, "layers": 1, "width": 32, "heads": 2, "max_length": 48}
    lm = causal_lm(request.param, **shape, initializer_range=0.3)
    policy = UtteranceActor(language_actor(lm), env.tokenizer.control, action_length=env.action_length, seed=0)
    rollout = env.rollout(8, policy, break_when_any_done=False)
    return policy, rows_from_rollout(rollout, unfinished="truncate", carry=["token_log_prob"]), env.tokenizer


def test_training_scores_the_tokens_as_acting_did(played):
    policy, rows, tokenizer = played
    assert rows["tokens"].max() < tokenizer.vocab_size
    for found in (row_log_prob(policy, rows), RowTokenActor(policy).get_dist(rows).log_prob(rows["tokens"])):
        torch.testing.assert_close(found, rows["token_log_prob"], atol=1e-5, rtol=1e-5)


def test_ppo_sees_fresh_data_as_on_policy(played):
    policy, rows, _ = played
    loss = PPOLoss(policy, value_module(ValueHead(32)))
    out = loss(loss.estimate(rows))
    torch.testing.assert_close(out["ESS"], torch.tensor(1.0), atol=1e-5, rtol=0)
    assert out["kl_approx"].abs() < 1e-5
    each = PPOLoss(policy, value_module(ValueHead(32)), reduction="none", normalize_advantage=False)
    rows["advantage"] = torch.ones_like(rows["token_log_prob"])
    rows["value_target"] = torch.zeros_like(rows["token_log_prob"])
    ratio = -each(rows)["loss_objective"][decision_mask(rows["agent_mask"])]
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
