"""Episodes that drift too far are truncated, at the step at which they do."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms.conftest import HORIZON, drift, make_actor, make_env, play
from torchrl_lang.transforms import KLConstrainedTransform, KLLimitTransform

LIMIT = 1.0


def limited(truncated, batch=(16,), **options):
    actor = make_actor("tanh-normal")
    transform = KLConstrainedTransform(actor, limit=LIMIT, estimator="k3", **options)
    drift(actor)
    return TransformedEnv(make_env("tanh-normal", batch, truncated=truncated), transform), actor


@pytest.mark.parametrize("truncated", [True, False])
def test_truncates_at_the_step_at_which_the_sum_passes(truncated):
    """Replayed by hand: sums start anew after each reset, partial ones included; the end of a task is no truncation."""
    env, actor = limited(truncated)
    check_env_specs(env)
    steps = play(env, actor, 12)
    out = steps["next"]
    total = torch.zeros(16, 1)
    for t in range(12):
        assert torch.equal(steps["episode_kl"][:, t], total)
        total = total + out["kl"][:, t, None]
        torch.testing.assert_close(out["episode_kl"][:, t], total)
        passed = total > LIMIT
        ended = steps["count"][:, t] + 1 >= HORIZON
        assert torch.equal(out["truncated"][:, t], passed)
        assert torch.equal(out["terminated"][:, t], ended)
        assert torch.equal(out["done"][:, t], passed | ended)
        total = torch.where(out["done"][:, t], 0.0, total)
        assert not steps["truncated"][:, t].any()
    assert (out["truncated"] & ~out["terminated"]).any()
    assert (~out["truncated"] & out["terminated"]).any()


def test_an_episode_ends_there():
    env, actor = limited(False, batch=())
    torch.manual_seed(0)
    with torch.no_grad():
        episode = env.rollout(100, actor)
    assert episode["next", "done"][-1].item()
    assert not episode["next", "done"][:-1].any()


def test_nothing_changes_below_the_limit():
    actor = make_actor("tanh-normal")
    transform = KLConstrainedTransform(actor, limit=1e6)
    drift(actor)
    steps = play(TransformedEnv(make_env("tanh-normal", (4,)), transform), actor)
    plain = play(make_env("tanh-normal", (4,)), actor)
    assert not steps["next", "truncated"].any()
    assert torch.equal(steps["next", "done"], plain["next", "done"])


def test_rows_get_a_mask():
    rows = TensorDict(kl=torch.tensor([[0.0, 0.6, 0.0, 0.6, 0.1], [0.0, 0.1, 0.2, 0.3, 0.0]]), batch_size=[2])
    out = KLLimitTransform(LIMIT)(rows)
    assert out["within_kl_limit"].tolist() == [[True, True, True, False, False], [True] * 5]
    assert "within_kl_limit" not in rows.keys()


def test_steps_that_were_played_are_refused():
    steps = TensorDict(next=TensorDict(kl=torch.zeros(2), batch_size=[2]), batch_size=[2])
    with pytest.raises(ValueError, match="have been played"):
        KLLimitTransform(LIMIT)(steps)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_number_of_nats(limit):
    with pytest.raises(ValueError, match="above 0"):
        KLLimitTransform(limit)
