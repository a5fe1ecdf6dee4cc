"""Episodes that drift too far are truncated, at the step at which they do."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Binary, Composite
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms.conftest import (
    HORIZON,
    LinearEnv,
    drift,
    frozen_twin,
    log_prob_by_hand,
    make_actor,
    make_env,
    play,
)
from torchrl_lang.transforms import KLConstrainedTransform, KLLimitTransform

LIMIT = 1.0
ENDS = ("done", "terminated")


def limited(truncated, batch=(16,), **options):
    actor = make_actor("tanh-normal")
    transform = KLConstrainedTransform(actor, limit=LIMIT, estimator="k3", missing="zero", **options)
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


def test_rows_get_a_mask():
    rows = TensorDict(kl=torch.tensor([[0.0, 0.6, 0.0, 0.6, 0.1], [0.0, 0.1, 0.2, 0.3, 0.0]]), batch_size=[2])
    out = KLLimitTransform(LIMIT)(rows)
    assert out["within_kl_limit"].tolist() == [[True, True, True, False, False], [True] * 5]
    assert "within_kl_limit" not in rows.keys()


def test_steps_that_were_played_are_refused():
    steps = TensorDict(next=TensorDict(kl=torch.zeros(2), batch_size=[2]), batch_size=[2])
    with pytest.raises(ValueError, match="have been played"):
        KLLimitTransform(LIMIT)(steps)


def test_a_row_that_passed_stays_out():
    """Though a later log-ratio brings the sum below the limit again; a sum that is NaN has passed."""
    nan = float("nan")
    kl = torch.tensor([[0.5, 1.0, -1.0, 0.1], [0.5, nan, 0.0, 0.0], [1.0, 0.0, -0.5, 0.5]])
    out = KLLimitTransform(LIMIT)(TensorDict(kl=kl, batch_size=[3]))
    assert out["within_kl_limit"].tolist() == [[True, False, False, False]] * 2 + [[True] * 4]


@pytest.mark.parametrize(("shape", "batch"), [((2, 1), [2]), ((2,), [2]), ((2, 4), [2, 4])])
def test_one_divergence_a_row_has_no_tokens_to_mask(shape, batch):
    """What per="sequence" writes, and what single actions have."""
    with pytest.raises(ValueError, match=r"per='token'"):
        KLLimitTransform(LIMIT)(TensorDict(kl=torch.zeros(shape), batch_size=batch))


def test_a_policy_that_came_to_nan_has_passed():
    actor = make_actor("tanh-normal")
    env = TransformedEnv(make_env("tanh-normal", (3,)), KLConstrainedTransform(actor, limit=LIMIT))
    td = actor(env.reset())
    td["action_log_prob"][1] = float("nan")
    step = env.step(td)["next"]
    assert step["kl"].isnan().tolist() == [False, True, False]
    assert step["truncated"].flatten().tolist() == step["done"].flatten().tolist() == [False, True, False]


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_number_of_nats(limit):
    with pytest.raises(ValueError, match="limit, in nats, must be positive and finite"):
        KLLimitTransform(limit)


class AgentsEnv(LinearEnv):
    """Two agents, each with a reward and a ``done`` of its own; the second has one step more."""

    def __init__(self, batch_size=(), *, root=False, **options):
        super().__init__("agents", batch_size, **options)
        done = Binary(shape=(*self.wide, 1), dtype=torch.bool)
        agents = Composite(done=done, terminated=done.clone(), shape=self.wide)
        specs = Composite(agents=agents, shape=self.batch_size)
        if root:
            specs.update({name: Binary(shape=(*self.batch_size, 1), dtype=torch.bool) for name in ENDS})
        self.full_done_spec = specs
        self.root = root

    def _step(self, tensordict):
        out = super()._step(tensordict)
        last = torch.tensor([[HORIZON], [HORIZON + 1]])
        done = out["count"].unsqueeze(-2) >= last
        for name in ENDS:
            out["agents", name] = done.clone()
            if not self.root:
                del out[name]
            else:
                out[name] = done.all(-2)
        return out


@pytest.mark.parametrize("root", [False, True])
def test_each_agent_has_its_own_limit_and_reward(root):
    """Where ``done`` stands in the agents' group; numbers worked out from the steps."""
    actor, coef = make_actor("agents"), 0.3
    before = frozen_twin(actor)
    transform = KLConstrainedTransform(actor, coef, estimator="k3", limit=LIMIT, missing="zero")
    env = TransformedEnv(AgentsEnv((16,), root=root), transform)
    check_env_specs(env)
    drift(actor)
    steps = play(env, actor, 6)
    out = steps["next", "agents"]
    rho = log_prob_by_hand("agents", before, steps) - log_prob_by_hand("agents", actor, steps)
    kl = (rho.exp() - 1 - rho).unsqueeze(-1)
    torch.testing.assert_close(out["kl"].unsqueeze(-1), kl, rtol=1e-3, atol=1e-3)
    raw = out["observation"].sum(-1, keepdim=True)
    torch.testing.assert_close(out["raw_reward"], raw)
    torch.testing.assert_close(out["reward"], raw - coef * kl, rtol=1e-3, atol=1e-3)
    total = steps["agents", "episode_kl"] + out["kl"].unsqueeze(-1)
    torch.testing.assert_close(out["episode_kl"], total)
    assert torch.equal(out["truncated"], total > LIMIT)
    assert torch.equal(out["done"], out["truncated"] | out["terminated"])
    assert (out["truncated"][..., 0, :] != out["truncated"][..., 1, :]).any()
    assert not steps["agents", "episode_kl"][:, 0].any()


def grouped(*keys):
    """An environment whose ``done`` stands in these places."""
    env = make_env("tanh-normal")
    done = Binary(shape=(1,), dtype=torch.bool)
    specs = Composite()
    for key in keys:
        specs[key] = done.clone()
    env.full_done_spec = specs
    return env


@pytest.mark.parametrize(
    ("kl_key", "keys", "expected"),
    [
        (("a", "kl"), [("a", "done"), ("a", "terminated")], ("a", "episode_kl")),
        (("b", "kl"), [("a", "done"), ("b", "done"), "done"], ("b", "episode_kl")),
        (("c", "kl"), [("a", "done"), "done", "terminated"], "episode_kl"),
    ],
)
def test_done_is_found(kl_key, keys, expected):
    env = TransformedEnv(grouped(*keys), KLLimitTransform(LIMIT, kl_key=kl_key))
    assert expected in env.observation_spec.keys(True, True)
    assert env.transform.out_keys == [expected]
    beside = (*expected[:-1], "truncated") if isinstance(expected, tuple) else "truncated"
    assert beside in env.full_done_spec.keys(True, True)


def test_a_done_that_is_not_found_is_asked_for():
    keys = [("a", "done"), ("b", "done")]
    with pytest.raises(KeyError, match=r"none of \['done'\].*done_key="):
        _ = TransformedEnv(grouped(*keys), KLLimitTransform(LIMIT)).observation_spec
    named = TransformedEnv(grouped(*keys), KLLimitTransform(LIMIT, done_key=("b", "done"))).observation_spec
    assert ("b", "episode_kl") in named.keys(True, True)
