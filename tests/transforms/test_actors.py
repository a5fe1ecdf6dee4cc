"""One action a step, of every kind of actor: what is written, against formulas worked out by hand."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, assert_allclose_td
from tensordict.nn import set_composite_lp_aggregate
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms import world
from torchrl_lang.transforms import KLConstrainedTransform, KLDivergenceTransform, ReferenceModelLogProbTransform

ONE_HEAD = sorted(world.ACTORS.keys() - {"composite"})


def test_log_prob_kl_and_reward_by_hand(kind):
    transform, actor, before = world.drifted(kind)
    world.assert_adjusted(world.play(TransformedEnv(world.make_env(kind, (3,)), transform), actor), actor, before, kind)


def test_policy_is_untouched_and_nothing_undeclared_is_added(kind):
    """The same random stream, the same outputs, and no entry beside the three."""
    actor = world.make_actor(kind)
    plain = world.play(world.make_env(kind, (3,)), actor)
    drawn = torch.rand(3)
    transform = KLConstrainedTransform(actor)
    adjusted = world.play(TransformedEnv(world.make_env(kind, (3,)), transform), actor)
    assert torch.equal(torch.rand(3), drawn)
    names = [world.key_of(kind, name) for name in ("ref_log_prob", "kl", "raw_reward")]
    added = {*names, *(("next", *world.parts_of(name)) for name in names)}
    assert set(adjusted.keys(True, True)) - set(plain.keys(True, True)) == added
    same = [key for key in plain.keys(True, True) if key != ("next", *world.parts_of(world.key_of(kind, "reward")))]
    assert_allclose_td(adjusted.select(*same), plain.select(*same), rtol=0, atol=0)


def test_specs_and_random_actions_which_cost_nothing_when_told_so(kind):
    env = TransformedEnv(world.make_env(kind, (3,)), KLConstrainedTransform(world.make_actor(kind), missing="zero"))
    torch.manual_seed(0)
    drawn = torch.rand(2)
    torch.manual_seed(0)
    env.reset()
    assert env.output_spec is not None
    assert torch.equal(torch.rand(2), drawn)  # making the specs draws nothing
    check_env_specs(env)
    reward = env.full_reward_spec[world.key_of(kind, "reward")]
    assert reward.is_in(torch.full(reward.shape, -1e6))  # the raw reward was bounded
    out = env.rollout(2)["next"]
    assert (out[world.key_of(kind, "kl")] == 0).all()
    assert torch.equal(out[world.key_of(kind, "reward")], out[world.key_of(kind, "raw_reward")])
    assert (out[world.key_of(kind, "ref_log_prob")] != 0).all()


@pytest.mark.parametrize("estimator", ["k1", "exact"])
@pytest.mark.parametrize("aggregate", [True, False])
def test_composite_under_both_settings(aggregate, estimator):
    with set_composite_lp_aggregate(aggregate):
        actor = world.make_actor("composite")
        transform = KLConstrainedTransform(actor, estimator=estimator, policy=actor)
        before = world.frozen_twin(actor)
        env = TransformedEnv(world.make_env("composite", (3,)), transform)
        check_env_specs(env)
        steps = world.play(env, world.drift(actor))
    assert steps["next", "kl"].shape == (3, 8)
    if estimator == "k1":
        acting, reference = (world.log_prob_by_hand("composite", each, steps) for each in (actor, before))
        expected = acting - reference
    else:
        heads = (closed_form("composite", policy, steps) for policy in (actor, before))
        expected = sum(kl_divergence(p, q) for p, q in zip(*heads, strict=True))
    torch.testing.assert_close(steps["next", "kl"], expected, rtol=1e-3, atol=1e-3)


def closed_form(kind, actor, steps):
    """The distributions of torch, built from the parameters; a squashed Gaussian diverges as the Gaussian does."""
    with torch.no_grad():
        read = steps.select(world.key_of(kind, "observation"))
        out = actor[0](read)["params"] if kind == "composite" else actor.get_dist_params(read)
    if kind in ("categorical", "one-hot"):
        return Categorical(logits=out["logits"])
    if kind == "composite":
        return Categorical(logits=out["move", "logits"]), Independent(Normal(**out["push"]), 1)
    normal = Normal(out[world.key_of(kind, "loc")], out[world.key_of(kind, "scale")])
    return normal if kind == "normal" else Independent(normal, 1)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("kind", ONE_HEAD)
def test_exact_is_the_closed_form(kind, direction):
    actor = world.make_actor(kind)
    transform = KLConstrainedTransform(actor, estimator="exact", policy=actor, direction=direction)
    before = world.frozen_twin(actor)
    world.drift(actor)
    env = TransformedEnv(world.make_env(kind, (3,)), transform)
    check_env_specs(env)
    steps = world.play(env, actor)
    p, q = closed_form(kind, actor, steps), closed_form(kind, before, steps)
    expected = kl_divergence(p, q) if direction == "reverse" else kl_divergence(q, p)
    kl = steps["next", *world.parts_of(world.key_of(kind, "kl"))]
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-5)
    assert (kl >= 0).all()
    assert kl.mean() > 0.01


def test_exact_takes_the_parameters_of_the_policy_that_acted():
    """Data of a policy that has trained on since then: its parameters are in the data."""
    actor = world.make_actor("tanh-normal")
    chain = KLConstrainedTransform(actor, estimator="exact", policy=actor)
    before = world.frozen_twin(actor)
    world.drift(actor)
    acted = world.frozen_twin(actor)
    steps = world.steps_of(actor)
    world.drift(actor, 2.0)
    expected = kl_divergence(closed_form("tanh-normal", acted, steps), closed_form("tanh-normal", before, steps))
    torch.testing.assert_close(chain(steps.clone())["next", "kl"], expected, rtol=1e-4, atol=1e-5)
    without = steps.exclude("loc", "scale")
    now = kl_divergence(closed_form("tanh-normal", actor, steps), closed_form("tanh-normal", before, steps))
    torch.testing.assert_close(chain(without)["next", "kl"], now, rtol=1e-4, atol=1e-5)
    assert "loc" not in without.keys()


def test_estimates_converge_to_the_exact_divergence(kind):
    """Means over 20,000 actions for one observation, within four standard errors."""
    actor = world.make_actor(kind)
    reference = ReferenceModelLogProbTransform(actor)
    exact = KLDivergenceTransform("exact", policy=actor, reference=actor, out_key="exact")
    world.drift(actor, 0.4)
    torch.manual_seed(0)
    wide = (20_000, 2) if kind == "agents" else (20_000,)
    data = TensorDict(agents=TensorDict(batch_size=wide), batch_size=[20_000])
    data[world.key_of(kind, "observation")] = torch.tensor([0.5, -1.0, 0.25]).expand(*wide, 3).clone()
    with torch.no_grad():
        data = reference(actor(data))
    keys = reference.reference.action_keys
    logs = {"log_prob_key": list(keys.log_prob), "ref_log_prob_key": keys.ref_log_prob}
    for estimator, direction in (("k1", "reverse"), ("k3", "reverse"), ("k3", "forward")):
        exact.direction = direction
        estimate = KLDivergenceTransform(estimator, direction=direction, out_key="estimate", **logs)(data)["estimate"]
        error = estimate.std(0) / 20_000**0.5
        assert ((estimate.mean(0) - exact(data)["exact"][0]).abs() <= 4 * error).all()
