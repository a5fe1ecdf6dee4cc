"""Rewards count at the agent's tokens only, whoever reads them: at other tokens and on padding they may be anything."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, assert_allclose_td

from tests.objectives.chai_rows import every_loss
from tests.objectives.conftest import WIDTH, make_actor, make_heads, make_rows
from tests.objectives.test_ppo import make_ppo
from torchrl_lang.data import best_rows, row_returns
from torchrl_lang.envs.random_walks import RandomWalksEnv, walk_optimality
from torchrl_lang.evaluation import value_report
from torchrl_lang.functional import return_conditions
from torchrl_lang.modules import ReturnConditionedActor, ReturnEmbedding, UtteranceActor, condition_on_returns
from torchrl_lang.objectives import base
from torchrl_lang.recipes.algorithms import DT
from torchrl_lang.recipes.imitation import build_returns
from torchrl_lang.schema import ControlTokens

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")

CONTROL = ControlTokens(pad=0, end_of_action=1, forbidden=())


def with_garbage(rows):
    """Other rewards where the agent wrote nothing."""
    return rows.clone().set("token_reward", torch.where(rows["agent_mask"], rows["token_reward"], 1e3))


@pytest.mark.parametrize("name", [*every_loss(), "ppo"])
def test_losses(name, monkeypatch):
    def without_rewards(tokens, attention_mask, agent_mask, token_reward=None, **options):
        return check_values(tokens, attention_mask, agent_mask, None, **options)

    check_values = base.check_values
    monkeypatch.setattr(base, "check_values", without_rewards)  # it refuses such rows
    if name == "ppo":
        loss, rows = make_ppo(), make_rows()
        rows["token_log_prob"] = torch.full(rows["tokens"].shape, -2.0)
        given = [loss.estimate(rows.clone()), loss.estimate(with_garbage(rows))]
        assert_allclose_td(*(rows.exclude("token_reward") for rows in given))
    else:
        make, rows = every_loss()[name]
        loss, given = make(), [rows, with_garbage(rows)]
    expected, found = (loss(rows) for rows in given)
    assert_allclose_td(found, expected, rtol=0, atol=0)


def test_returns_and_what_is_chosen_by_them():
    rows = make_rows()
    torch.testing.assert_close(row_returns(with_garbage(rows)), row_returns(rows))
    torch.testing.assert_close(best_rows(with_garbage(rows), 2)["tokens"], best_rows(rows, 2)["tokens"])


@pytest.mark.parametrize("mode", ["constant", "decremented"])
def test_return_conditions(mode, tmp_path):
    rows = make_rows()
    keys = ("attention_mask", "agent_mask", "token_reward")
    expected, found = (return_conditions(*(r[key] for key in keys), mode) for r in (rows, with_garbage(rows)))
    torch.testing.assert_close(found, expected)
    options = DT(data=tmp_path, out=tmp_path, mode=mode)
    low, high = ([getattr(build_returns(options, r, 8, 1), name) for r in (rows, with_garbage(rows))]
                 for name in ("low", "high"))  # fmt: skip
    assert (low[0], high[0]) == (low[1], high[1])


def test_a_policy_that_is_asked_for_a_return():
    """It plays on from rows, and asks for what their rewards leave of the return."""
    actor = condition_on_returns(make_actor(), ReturnEmbedding(WIDTH, -20.0, 20.0, mode="decremented"))
    policy = ReturnConditionedActor(UtteranceActor(actor, CONTROL, 4), 1.0)
    rows = make_rows()
    torch.testing.assert_close(policy.conditioned(with_garbage(rows))["tokens"], policy.conditioned(rows)["tokens"])


def test_reports():
    rows, (q, v) = make_rows(), (head.module for head in make_heads())
    expected, found = (value_report(make_actor(), q, v, r, CONTROL) for r in (rows, with_garbage(rows)))
    assert str(found.as_dict()) == str(expected.as_dict())  # NaN where nothing is known
    graph = RandomWalksEnv(batch_size=[1], seed=0).graph
    walks = TensorDict(
        tokens=torch.tensor([[0, 3, 5, 7, 0]]),
        attention_mask=torch.tensor([[True, True, True, True, False]]),
        agent_mask=torch.tensor([[False, False, True, True, False]]),
        token_reward=torch.tensor([[0.0, 0.0, -1.0, -1.0, 0.0]]),
        terminated=torch.tensor([[True]]),
        batch_size=[1],
    )
    torch.testing.assert_close(walk_optimality(with_garbage(walks), graph, 10), walk_optimality(walks, graph, 10))
