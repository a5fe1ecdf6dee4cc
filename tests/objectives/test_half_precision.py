"""Fresh heads of float32 over a model in half precision: acting, values, guidance and all losses."""

from __future__ import annotations

import pytest
import torch

import tests.objectives.conftest as common
from tests.objectives.conftest import LOSSES, losses_of, make_rows, total
from torchrl_lang.data import rows_from_rollout
from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.modules import (
    QValueHead,
    TiedQValueHead,
    UtteranceActor,
    ValueGuidance,
    ValueHead,
    causal_lm,
    language_actor,
    row_log_prob,
    value_module,
)
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.transforms import frozen_copy

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALF
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_are_those_of_single_precision_up_to_rounding(name, dtype, monkeypatch):
    rows, whole = make_rows(), common.make_actor
    expected = losses_of(LOSSES[name]()(rows))
    monkeypatch.setattr(common, "make_actor", lambda *args, **options: whole(*args, **options).to(dtype))
    loss = LOSSES[name]()
    out = losses_of(loss(rows))
    assert {value.dtype for value in out.values()} == {torch.float32}
    for key, value in expected.items():
        torch.testing.assert_close(out[key], value, rtol=0.02, atol=0.01)
    total(out).backward()
    gradients = [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]
    assert {gradient.dtype for gradient in gradients} >= {dtype}
    assert all(gradient.isfinite().all() for gradient in gradients)


def language_model(env, dtype):
    torch.manual_seed(0)
    shape = {"vocab_size": env.tokenizer.vocab_size, "layers": 2, "width": 32, "heads": 2, "max_length": 48}
    return causal_lm("gpt2", **shape, initializer_range=0.3).to(dtype)


@HALF
@pytest.mark.parametrize("tied", [False, True])
def test_acting_with_values_and_the_loss_on_what_was_played(tied, dtype):
    env = CorridorEnv(4, start=0, max_turns=8, batch_size=[16], seed=0)
    lm = language_model(env, dtype)
    q = TiedQValueHead(32, lm.get_output_embeddings()) if tied else QValueHead(32, env.tokenizer.vocab_size)
    torch.nn.init.normal_(q.out_weight)
    value, actor = ValueHead(32), language_actor(lm)
    assert value(torch.randn(2, 32, dtype=dtype)).dtype == torch.float32
    guided = UtteranceActor(
        actor, env.tokenizer.control, 2, guidance=ValueGuidance(q, value, beta=1.0, clip=1.0), value=value, seed=0
    )
    plain = UtteranceActor(actor, env.tokenizer.control, 2, guidance=ValueGuidance(q, beta=0.0), seed=0)
    batch = env.reset()
    assert guided(batch.clone())["state_value"].dtype == torch.float32
    different = guided(batch.clone())["token_log_prob"] - plain(batch.clone())["token_log_prob"]
    assert different.abs().max() > 0.1
    policy = UtteranceActor(actor, env.tokenizer.control, 2, seed=0, value=value)
    rollout = env.rollout(8, policy, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="truncate", carry=["token_log_prob"])
    torch.testing.assert_close(row_log_prob(policy, rows), rows["token_log_prob"], rtol=0.05, atol=0.1)
    options = {"kl_weight": 0.1, "kl_estimator": "exact", "reference": frozen_copy(policy)}
    loss = PPOLoss(policy, value_module(value), entropy_weight=0.01, **options)
    out = loss(loss.estimate(rows))
    assert out["ESS"] > 0.99
    sum(losses_of(out).values()).backward()
    assert all(p.grad.isfinite().all() for p in (*lm.parameters(), *value.parameters()))
