"""Losses and rewards in float64 keep its precision: no number on the way is rounded to float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.objectives.conftest import make_actor, make_bc, make_heads, make_oreo, make_rows
from tests.objectives.oracle import ilql_losses
from tests.objectives.oracle_qbackup import qbackup_losses
from tests.objectives.tables import table_loss
from tests.objectives.test_ilql import table_rows
from tests.objectives.test_qbackup import KINDS, q_loss
from torchrl_lang.objectives import BCLoss, PPOLoss
from torchrl_lang.transforms import RewardAdjustmentTransform, frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

CLOCKS = {"gamma": 0.9, "turn_gamma": 0.7}
PRECISE = {"rtol": 1e-12, "atol": 1e-12}


def in_float64(rows):
    return rows.apply(lambda entry: entry.double() if entry.is_floating_point() else entry)


def precise_rows(keep_reward):
    """Rows over float64 tables, with float64 rewards or, as they are stored, float32 ones."""
    rows, tables = table_rows(seed=3)
    reward = rows["token_reward"]
    rows = in_float64(rows)
    if keep_reward:
        rows["token_reward"] = reward
    return rows, tables, {key: value.numpy() for key, value in rows.items() if key != "table"}


@pytest.mark.parametrize("keep_reward", [True, False])
@pytest.mark.parametrize("target", ["td", "mc", "lambda"])
def test_ilql(target, keep_reward):
    rows, tables, plain = precise_rows(keep_reward)
    plain["token_reward"] = plain["token_reward"].astype(np.float64)
    out = table_loss(2, 5, cql_weight=1.0, target=target, **CLOCKS).double()(rows)
    for term, value in ilql_losses(plain, *tables, target=target, **CLOCKS).items():
        if term != "margin":
            np.testing.assert_allclose(out[f"loss_{term}"].item(), value, **PRECISE, err_msg=term)


@pytest.mark.parametrize("kind", KINDS)
def test_cql_bcq_and_psi(kind):
    rows, (_, *tables), plain = precise_rows(keep_reward=False)
    options = {"threshold": 0.0} if kind == "bcq" else {}
    out = q_loss(kind, **CLOCKS, **options).double()(rows)
    expected = qbackup_losses(plain, *tables, kind, **CLOCKS)
    for term in ("qvalue", "actor"):
        np.testing.assert_allclose(out[f"loss_{term}"].item(), expected[term], **PRECISE, err_msg=term)


def make_ppo(**options):
    reference = frozen_copy(make_actor(seed=5).double())
    return PPOLoss(make_actor(), make_heads()[1], kl_estimator="exact", reference=reference, **options)


@pytest.mark.parametrize("name", ["bc", "oreo", "ppo"])
def test_the_weight_of_the_divergence(name):
    """Not 0.1 rounded to float32, 0.10000000149."""
    if name == "ppo":
        loss, rows = make_ppo(kl_weight=0.1).double(), in_float64(make_rows())
        rows["token_log_prob"] = torch.full(rows["tokens"].shape, -2.0, dtype=torch.float64)
        out = loss(loss.estimate(rows))
        # PPO reports the divergence of a row, the sum over its decisions.
        decisions, played = rows["agent_mask"].sum(), rows["agent_mask"].any(-1).sum()
        expected = 0.1 * out["kl"] * played / decisions
    else:
        make = make_oreo if name == "oreo" else make_bc
        options = {"reference": frozen_copy(make_actor(seed=5))} if name == "bc" else {}
        out = make(kl_weight=0.1, **options).double()(in_float64(make_rows()))
        expected = 0.1 * out["kl"]
    assert out["kl"] > 1e-3
    torch.testing.assert_close(out["loss_kl"], expected, **PRECISE)


def test_the_penalty_of_a_reward():
    step = TensorDict(reward=torch.tensor([[1.0]]), kl=torch.tensor([3.0]), batch_size=[1]).double()
    reward = RewardAdjustmentTransform(coef=0.1, kl_key="kl")(step)["reward"]
    torch.testing.assert_close(reward, torch.tensor([[0.7]], dtype=torch.float64), **PRECISE)


def test_the_weight_of_the_environments_tokens():
    """``.3`` is no number of float32. By hand: each real token but a row's first has its weight, over their number."""
    actor, rows = make_actor().double(), in_float64(make_rows())
    tokens, real, agent = rows["tokens"], rows["attention_mask"], rows["agent_mask"]
    log_prob = actor(rows.copy())["logits"].log_softmax(-1)
    total = count = 0.0
    for row, place in (real[:, 1:]).nonzero().tolist():
        weight = 1.0 if agent[row, place + 1] else 0.3
        total -= weight * log_prob[row, place, tokens[row, place + 1]].item()
        count += 1
    found = BCLoss(actor, transition_weight=0.3)(rows)["loss_actor"].item()
    np.testing.assert_allclose(found, total / count, **PRECISE)
