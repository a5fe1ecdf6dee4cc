"""One action a step, of every kind of actor: what is written, against formulas worked out by hand."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, assert_allclose_td
from tensordict.nn import set_composite_lp_aggregate
from torch.distributions import Categorical, kl_divergence
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms.conftest import (
    ACTORS,
    drift,
    frozen_twin,
    key_of,
    log_prob_by_hand,
    make_actor,
    make_env,
    parts_of,
    play,
)
from torchrl_lang.transforms import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
)

ONE_HEAD = sorted(ACTORS.keys() - {"composite"})
COEF = 0.3


def adjusted_rollout(kind, *, by=0.5, steps=8, batch=(3,), **options):
    actor = make_actor(kind)
    transform = KLConstrainedTransform(actor, COEF, **options)
    before = frozen_twin(actor)
    drift(actor, by)
    env = TransformedEnv(make_env(kind, batch), transform)
    return play(env, actor, steps), before, actor


def penalty_of(kind, steps, before, actor):
    return log_prob_by_hand(kind, actor, steps) - log_prob_by_hand(kind, before, steps)


def summed(kind, kl):
    return kl.sum(-1, keepdim=True) if kind == "normal" else kl.unsqueeze(-1)


def test_log_prob_kl_and_reward_by_hand(kind):
    steps, before, actor = adjusted_rollout(kind)
    out = steps["next"]
    expected = log_prob_by_hand(kind, before, steps)
    torch.testing.assert_close(out[key_of(kind, "ref_log_prob")], expected, rtol=1e-4, atol=1e-4)
    penalty = penalty_of(kind, steps, before, actor)
    torch.testing.assert_close(out[key_of(kind, "kl")], penalty, rtol=1e-3, atol=1e-3)
    raw = out[key_of(kind, "observation")].sum(-1, keepdim=True)
    torch.testing.assert_close(out[key_of(kind, "raw_reward")], raw)
    torch.testing.assert_close(out[key_of(kind, "reward")], raw - COEF * summed(kind, penalty), rtol=1e-3, atol=1e-3)


def test_policy_is_untouched_and_nothing_undeclared_is_added(kind):
    """The same random stream, the same outputs, and no entry beside the three."""
    actor = make_actor(kind)
    plain = play(make_env(kind, (3,)), actor)
    drawn = torch.rand(3)
    transform = KLConstrainedTransform(actor)
    adjusted = play(TransformedEnv(make_env(kind, (3,)), transform), actor)
    assert torch.equal(torch.rand(3), drawn)
    names = [key_of(kind, name) for name in ("ref_log_prob", "kl", "raw_reward")]
    added = {*names, *(("next", *parts_of(name)) for name in names)}
    assert set(adjusted.keys(True, True)) - set(plain.keys(True, True)) == added
    same = [key for key in plain.keys(True, True) if key != ("next", *parts_of(key_of(kind, "reward")))]
    assert_allclose_td(adjusted.select(*same), plain.select(*same), rtol=0, atol=0)


def test_specs(kind):
    transform = KLConstrainedTransform(make_actor(kind), missing="zero")
    env = TransformedEnv(make_env(kind, (3,)), transform)
    torch.manual_seed(0)
    drawn = torch.rand(2)
    torch.manual_seed(0)
    env.reset()
    assert env.output_spec is not None
    assert torch.equal(torch.rand(2), drawn)  # making the specs draws nothing
    check_env_specs(env)
    reward = env.full_reward_spec[key_of(kind, "reward")]
    assert reward.is_in(torch.full(reward.shape, -1e6))  # the raw reward was bounded


@pytest.mark.parametrize("estimator", ["k1", "exact"])
@pytest.mark.parametrize("aggregate", [True, False])
def test_composite_under_both_settings(aggregate, estimator):
    with set_composite_lp_aggregate(aggregate):
        actor = make_actor("composite")
        transform = KLConstrainedTransform(actor, COEF, estimator=estimator, policy=actor)
        before = frozen_twin(actor)
        drift(actor)
        env = TransformedEnv(make_env("composite", (3,)), transform)
        check_env_specs(env)
        steps = play(env, actor)
    assert steps["next", "kl"].shape == (3, 8)
    if estimator == "k1":
        expected = penalty_of("composite", steps, before, actor)
        torch.testing.assert_close(steps["next", "kl"], expected, rtol=1e-3, atol=1e-3)
        return
    p, q = (dist_heads(policy, steps) for policy in (actor, before))
    expected = sum(kl_divergence(a, b) for a, b in zip(p, q, strict=True))
    torch.testing.assert_close(steps["next", "kl"], expected, rtol=1e-4, atol=1e-5)


def dist_heads(actor, steps):
    with torch.no_grad():
        params = actor[0](steps.select("observation"))["params"]
    push = torch.distributions.Normal(params["push", "loc"], params["push", "scale"])
    return Categorical(logits=params["move", "logits"]), torch.distributions.Independent(push, 1)


def closed_form(kind, actor, steps):
    """The distributions of torch, built from the parameters; a squashed Gaussian diverges as the Gaussian does."""
    group = ("agents",) if kind == "agents" else ()
    with torch.no_grad():
        out = actor.get_dist_params(steps.select((*group, "observation") if group else "observation"))
    if kind in ("categorical", "one-hot"):
        return Categorical(logits=out["logits"])
    loc, scale = (out[(*group, name) if group else name] for name in ("loc", "scale"))
    normal = torch.distributions.Normal(loc, scale)
    return normal if kind == "normal" else torch.distributions.Independent(normal, 1)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("kind", ONE_HEAD)
def test_exact_is_the_closed_form(kind, direction):
    actor = make_actor(kind)
    transform = KLConstrainedTransform(actor, COEF, estimator="exact", policy=actor, direction=direction)
    before = frozen_twin(actor)
    drift(actor)
    env = TransformedEnv(make_env(kind, (3,)), transform)
    check_env_specs(env)
    steps = play(env, actor)
    p, q = closed_form(kind, actor, steps), closed_form(kind, before, steps)
    expected = kl_divergence(p, q) if direction == "reverse" else kl_divergence(q, p)
    kl = steps["next", *parts_of(key_of(kind, "kl"))]
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-5)
    assert (kl >= 0).all()
    assert kl.mean() > 0.01


def test_exact_takes_the_parameters_of_the_policy_that_acted():
    """Data of a policy that has trained on since then: its parameters are in the data."""
    actor = make_actor("tanh-normal")
    chain = KLConstrainedTransform(actor, estimator="exact", policy=actor)
    before = frozen_twin(actor)
    drift(actor)
    acted = frozen_twin(actor)
    steps = play(make_env("tanh-normal", (3,)), actor)
    drift(actor, 2.0)
    expected = kl_divergence(closed_form("tanh-normal", acted, steps), closed_form("tanh-normal", before, steps))
    torch.testing.assert_close(chain(steps.clone())["next", "kl"], expected, rtol=1e-4, atol=1e-5)
    without = steps.exclude("loc", "scale")
    now = kl_divergence(closed_form("tanh-normal", actor, steps), closed_form("tanh-normal", before, steps))
    torch.testing.assert_close(chain(without)["next", "kl"], now, rtol=1e-4, atol=1e-5)
    assert "loc" not in without.keys()


def test_estimates_converge_to_the_exact_divergence(kind):
    """Means over 20,000 actions for one observation, within four standard errors."""
    actor = make_actor(kind)
    reference = ReferenceModelLogProbTransform(actor)
    exact = KLDivergenceTransform("exact", policy=actor, reference=actor, out_key="exact")
    drift(actor, 0.4)
    torch.manual_seed(0)
    group = ("agents",) if kind == "agents" else ()
    wide = (20_000, 2) if group else (20_000,)
    data = TensorDict(batch_size=[20_000])
    if group:
        data["agents"] = TensorDict(batch_size=wide)
    data[(*group, "observation")] = torch.tensor([0.5, -1.0, 0.25]).expand(*wide, 3).clone()
    with torch.no_grad():
        data = exact(reference(actor(data)))
    action_keys = reference.reference.action_keys
    for estimator, direction in (("k1", "reverse"), ("k3", "reverse"), ("k3", "forward")):
        estimate = KLDivergenceTransform(
            estimator,
            direction=direction,
            log_prob_key=list(action_keys.log_prob),
            ref_log_prob_key=action_keys.ref_log_prob,
            out_key="estimate",
        )(data)["estimate"]
        if direction == "forward":
            exact.direction = "forward"
            data = exact(data)
        error = estimate.std(0) / 20_000**0.5
        assert ((estimate.mean(0) - data["exact"][0]).abs() <= 4 * error).all()
