"""Actors with a memory: the reference keeps one of its own."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict import assert_allclose_td
from torch.distributions import Independent, Normal, kl_divergence
from torchrl.collectors import Collector
from torchrl.envs import SerialEnv, TransformedEnv
from torchrl.envs.utils import check_env_specs
from torchrl.modules import TanhNormal

from tests.transforms.conftest import drift, frozen_twin, make_env, make_recurrent, play, recurrent_env
from torchrl_lang.transforms import KLConstrainedTransform, RecurrentReference

COEF = 0.3
OWN = ("ref_log_prob", "kl", "raw_reward", "reference")


@pytest.fixture(params=["lstm", "gru"])
def actor(request):
    return make_recurrent(request.param)


def adjusted(actor, batch=(3,), steps=9, **options):
    transform = KLConstrainedTransform(actor, COEF, **options)
    before = frozen_twin(actor)
    drift(actor, 0.3)
    env = recurrent_env(actor, batch, [transform])
    return play(env, actor, steps), before, env


def alone(before, steps):
    """Log-probability under the reference on its own."""
    loc, scale = parameters_alone(before, steps)
    return TanhNormal(loc, scale).log_prob(steps["action"])


def parameters_alone(before, steps):
    """The reference over each row, one step after the other, its state zero where an episode begins."""
    states = [key for key in before.in_keys if "recurrent" in str(key)]
    out = []
    td = steps[..., 0].select("observation", "is_init", *states).clone()
    for key in states:
        td[key].zero_()
    for t in range(steps.shape[-1]):
        now = steps[..., t]
        td["observation"], td["is_init"] = now["observation"], now["is_init"]
        with torch.no_grad():
            before(td)
        out.append(torch.stack([td["loc"], td["scale"]]))
        for key in states:
            td[key] = td["next", key]
    return torch.stack(out, -2)


@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_the_reference_over_the_episodes_by_itself(actor, batch):
    """Across partial resets: rows end at different steps."""
    steps, before, _ = adjusted(actor, batch)
    assert steps["next", "done"].any()
    torch.testing.assert_close(steps["next", "ref_log_prob"], alone(before, steps), rtol=1e-4, atol=1e-4)
    kl = steps["action_log_prob"] - steps["next", "ref_log_prob"]
    torch.testing.assert_close(steps["next", "kl"], kl, rtol=1e-4, atol=1e-4)
    out = steps["next"]
    torch.testing.assert_close(out["reward"], out["raw_reward"] - COEF * kl.unsqueeze(-1), rtol=1e-4, atol=1e-4)
    assert kl.abs().mean() > 0.01


def test_its_state_is_not_the_policys(actor):
    steps, _, _ = adjusted(actor)
    for key in (key for key in actor.in_keys if "recurrent" in str(key)):
        assert not torch.allclose(steps["next", "reference", key], steps["next", key])
        begins = steps["is_init"].squeeze(-1)
        assert (steps["reference", key][begins] == 0).all()
        assert (steps["reference", key][~begins] != 0).any(-1).any(-1).all()


def test_policy_is_untouched(actor):
    plain = play(recurrent_env(actor, (3,)), actor)
    steps = play(recurrent_env(actor, (3,), [KLConstrainedTransform(actor)]), actor)
    same = [key for key in plain.keys(True, True) if key != ("next", "reward")]
    assert_allclose_td(steps.select(*same), plain.select(*same), rtol=0, atol=0)
    torch.testing.assert_close(steps["next", "kl"], torch.zeros(3, 8), rtol=0, atol=1e-5)


def test_specs(actor):
    check_env_specs(recurrent_env(actor, (3,), [KLConstrainedTransform(actor)]))
    check_env_specs(recurrent_env(actor, (), [KLConstrainedTransform(actor, estimator="exact", policy=actor)]))


def test_over_serial_env(actor):
    transform = KLConstrainedTransform(actor, COEF)
    before = frozen_twin(actor)
    drift(actor, 0.3)
    chain = recurrent_env(actor, (2, 2), [transform]).transform.clone()
    env = TransformedEnv(SerialEnv(2, functools.partial(make_env, "tanh-normal", (2,))), chain)
    check_env_specs(env)
    steps = play(env, actor, 6)
    torch.testing.assert_close(steps["next", "ref_log_prob"], alone(before, steps), rtol=1e-4, atol=1e-4)


def test_without_the_state_in_the_environment(actor):
    env = TransformedEnv(make_env("tanh-normal", (3,)), KLConstrainedTransform(actor))
    with pytest.raises(KeyError, match="make_tensordict_primer"):
        env.reset()


def raw(steps):
    out = steps.exclude(*OWN, *(("next", key) for key in OWN))
    return out.set(("next", "reward"), steps["next", "raw_reward"])


def test_a_batch_in_one_pass_is_step_by_step(actor):
    """Sequences that begin with an episode, with further episodes behind it."""
    steps, _, env = adjusted(actor)
    batch = raw(steps)
    assert batch.names[-1] == "time"
    out = env.transform[-1].clone()(batch)
    torch.testing.assert_close(out["next", "kl"], steps["next", "kl"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out["next", "reward"], steps["next", "reward"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", [slice(None, None), 0])
def test_a_batch_from_the_middle_of_an_episode(actor, cut):
    """An error, with a time dimension or without; unless the data have the reference's own state."""
    steps, _, env = adjusted(actor)
    transform = env.transform[-1].clone()
    begins = steps["is_init"][..., 0]
    start = next(t for t in range(1, 9) if not begins[:, t].all())
    middle = steps[:, start:][:, cut]
    with pytest.raises(ValueError, match="middle of an episode"):
        transform(raw(middle))
    kept = raw(middle)
    kept["reference"] = middle["reference"]
    torch.testing.assert_close(transform(kept)["next", "kl"], middle["next", "kl"], rtol=1e-4, atol=1e-4)


def test_behind_a_collector(actor):
    transform = KLConstrainedTransform(actor, COEF)
    before = frozen_twin(actor)
    drift(actor, 0.3)
    collector = Collector(
        recurrent_env(actor, (3,)),
        actor,
        frames_per_batch=27,
        total_frames=27,
        postproc=transform,
        auto_register_policy_transforms=False,
    )
    steps = next(iter(collector)).clone()
    collector.shutdown()
    torch.testing.assert_close(steps["next", "ref_log_prob"], alone(before, steps), rtol=1e-4, atol=1e-4)


def test_exact_divergence(actor):
    """Of the Gaussians below the squashing: the policy's parameters are in the data, the reference's by itself."""
    twin = frozen_twin(actor)
    steps, _, _ = adjusted(actor, batch=(64,), estimator="exact", policy=actor)
    assert "ref_log_prob" not in steps["next"].keys()
    expected = parameters_alone(twin, steps)
    mine, its = (gaussian(loc, scale) for loc, scale in ((steps["loc"], steps["scale"]), expected))
    torch.testing.assert_close(steps["next", "kl"], kl_divergence(mine, its), rtol=1e-3, atol=1e-4)
    assert steps["next", "kl"].mean() > 0.01


def test_a_policy_that_is_run_remembers_for_itself(actor):
    """Without its parameters in the data it is run on the state with which it acted, not on the reference's."""
    steps, _, env = adjusted(actor, estimator="exact", policy=actor)
    expected = steps["next", "kl"]
    transform = env.transform[-1].clone()
    without = raw(steps).exclude("loc", "scale")
    torch.testing.assert_close(transform(without)["next", "kl"], expected, rtol=1e-3, atol=1e-4)
    one = without[:, 4]
    one["reference"] = steps["reference"][:, 4]
    torch.testing.assert_close(transform(one)["next", "kl"], expected[:, 4], rtol=1e-3, atol=1e-4)


def gaussian(loc, scale):
    return Independent(Normal(loc, scale), 1)


def test_it_is_recognised():
    actor = make_recurrent()
    reference = KLConstrainedTransform(actor).transforms[0].reference
    assert isinstance(reference, RecurrentReference)
    assert reference.state_keys == ["recurrent_state_h", "recurrent_state_c"]
