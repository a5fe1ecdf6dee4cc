"""One actor, every place where a transform can stand: the same data give the same numbers."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
from tensordict import assert_allclose_td
from torchrl.collectors import Collector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    ParallelEnv,
    SerialEnv,
    Transform,
    TransformedEnv,
)
from torchrl.envs.utils import check_env_specs

from tests.transforms.conftest import (
    compiled_step,
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
    AdaptiveKLController,
    KLConstrainedTransform,
    KLRewardTransform,
)

COEF = 0.3
WRITTEN = ["ref_log_prob", "kl", "raw_reward", "reward"]


def drifted(kind="tanh-normal", coef=COEF, **options):
    """A transform around a policy as it was, that policy as it is, and a twin as it was."""
    actor = make_actor(kind)
    transform = KLConstrainedTransform(actor, coef, **options)
    before = frozen_twin(actor)
    return transform, drift(actor), before


def assert_adjusted(steps, actor, before, kind="tanh-normal", coef=COEF):
    """The numbers worked out from the steps themselves."""
    ref = log_prob_by_hand(kind, before, steps)
    kl = log_prob_by_hand(kind, actor, steps) - ref
    out = steps["next"]
    torch.testing.assert_close(out["ref_log_prob"], ref, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out["kl"], kl, rtol=1e-3, atol=1e-3)
    raw = out["observation"].sum(-1, keepdim=True)
    torch.testing.assert_close(out["raw_reward"], raw)
    torch.testing.assert_close(out["reward"], raw - coef * kl.unsqueeze(-1), rtol=1e-3, atol=1e-3)


def raw_steps(actor, batch=(3,), kind="tanh-normal", **options):
    return play(make_env(kind, batch), actor, **options)


@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_environment_and_batch_agree(kind, batch):
    transform, actor, _ = drifted(kind)
    called = transform(raw_steps(actor, batch, kind))
    stepped = play(TransformedEnv(make_env(kind, batch), transform), actor)
    assert_allclose_td(stepped["next"], called["next"], rtol=1e-5, atol=1e-5)


def test_reset_writes_zeros_and_partial_resets_leave_the_rest():
    transform, actor, _ = drifted()
    env = TransformedEnv(make_env("tanh-normal", (3,)), transform)
    torch.manual_seed(0)
    td = env.reset()
    assert all((td[key] == 0).all() for key in WRITTEN[:-1])
    with torch.no_grad():
        td, ahead = env.step_and_maybe_reset(actor(td))
    kept = td["next", "kl"].clone()
    assert (kept != 0).all()
    ahead["_reset"] = torch.tensor([[True], [False], [False]])
    again = env.reset(ahead)
    assert again["kl"].tolist() == [0.0, *kept[1:].tolist()]


def within(kind="tanh-normal"):
    return TransformedEnv(make_env(kind), KLRewardTransform(make_actor(kind)))


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_within_a_worker_is_refused(batched):
    with pytest.raises(RuntimeError, match="goes over SerialEnv"):
        batched(2, within).reset()


def test_over_parallel_env():
    transform, actor, before = drifted(missing="zero")
    env = TransformedEnv(
        ParallelEnv(2, functools.partial(make_env, "tanh-normal", (2,)), mp_start_method="fork"), transform
    )
    try:
        check_env_specs(env)
        steps = play(env, actor, 6)
    finally:
        env.close()
    assert steps.batch_size == (2, 2, 6)
    assert_adjusted(steps, actor, before)


def test_collector_as_env_transform_and_as_postproc():
    transform, actor, before = drifted()
    collected = []
    options = {"frames_per_batch": 24, "total_frames": 48, "auto_register_policy_transforms": False}
    for place in ("env", "postproc"):
        plain = make_env("tanh-normal", (3,), seed=1)
        env = TransformedEnv(plain, transform.clone()) if place == "env" else plain
        torch.manual_seed(0)
        collector = Collector(env, actor, postproc=transform if place == "postproc" else None, **options)
        collected.append([batch.clone() for batch in collector])
        collector.shutdown()
    for inside, behind in zip(*collected, strict=True):
        assert_adjusted(inside, actor, before)
        assert_allclose_td(inside.select("next"), behind.select("next"), rtol=1e-5, atol=1e-5)
        assert set(inside.keys(True, True)) - set(behind.keys(True, True)) == {"ref_log_prob", "kl", "raw_reward"}


STORAGES = {
    "sampling": lambda _: ListStorage(100),
    "sampling from memory": lambda path: LazyMemmapStorage(100, scratch_dir=path),
    "extending": lambda _: LazyTensorStorage(100),
}


@pytest.mark.parametrize("when", STORAGES)
@pytest.mark.parametrize("kind", ["tanh-normal", "composite", "agents"])
def test_replay_buffer_in_both_directions(kind, when, tmp_path):
    transform, actor, _ = drifted(kind)
    steps = raw_steps(actor, (3,), kind).reshape(-1)
    buffer = ReplayBuffer(storage=STORAGES[when](tmp_path), batch_size=16)
    buffer.append_transform(transform, invert=when == "extending")
    buffer.extend(steps)
    torch.manual_seed(1)
    sample = buffer.sample()
    if not isinstance(sample, type(steps)):
        sample = torch.stack(list(sample))
    raw = sample.exclude(*(("next", *parts_of(key_of(kind, name))) for name in WRITTEN[:3]))
    reward, observation = (("next", *parts_of(key_of(kind, name))) for name in ("reward", "observation"))
    raw[reward] = raw[observation].sum(-1, keepdim=True)
    assert_allclose_td(sample, transform.clone()(raw.clone()), rtol=1e-5, atol=1e-5)
    assert (sample["next", *parts_of(key_of(kind, "kl"))] != 0).all()
    assert key_of(kind, "kl") not in steps["next"].keys(True)


def test_sampling_twice_adjusts_the_stored_reward_once():
    """What is stored stays raw, whatever the storage hands out."""
    for storage in (LazyTensorStorage(10), ListStorage(10)):
        transform, actor, _ = drifted()
        buffer = ReplayBuffer(storage=storage, batch_size=10)
        buffer.append_transform(transform)
        buffer.extend(raw_steps(actor).reshape(-1)[:10])
        for _ in range(3):
            step = buffer.sample()["next"]
            torch.testing.assert_close(step["reward"], step["raw_reward"] - COEF * step["kl"].unsqueeze(-1))
            torch.testing.assert_close(step["raw_reward"], step["observation"].sum(-1, keepdim=True))


def test_to_moves_the_reference_and_its_numbers():
    """In float64 the reference scores in float64; structure follows to the meta device; the policy stays."""
    transform, actor, before = drifted()
    transform.to(torch.float64)
    actor.to(torch.float64)
    steps = play(TransformedEnv(make_env("tanh-normal", (3,), dtype=torch.float64), transform), actor)
    assert steps["next", "ref_log_prob"].dtype == torch.float64
    assert steps["next", "kl"].dtype == torch.float64
    assert_adjusted(steps, actor, before.to(torch.float64))
    weights = transform.transforms[0].reference.frozen.state()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float64}
    transform.to("meta")
    weights = transform.transforms[0].reference.frozen.state()
    assert {tensor.device.type for tensor in weights.values()} == {"meta"}
    assert {p.device.type for p in actor.parameters()} == {"cpu"}
    assert transform.coef.device.type == "cpu"


@pytest.mark.parametrize("copy", ["clone", "pickle"])
def test_copies_work_elsewhere(copy):
    transform, actor, before = drifted(coef=AdaptiveKLController(COEF, target=1.0))
    env = TransformedEnv(make_env("tanh-normal", (3,)), transform)
    play(env, actor, 2)
    other = transform.clone() if copy == "clone" else pickle.loads(pickle.dumps(drop_container(transform)))  # noqa: S301
    assert type(other) is KLConstrainedTransform
    assert torch.equal(other.coef, transform.coef)
    steps = play(TransformedEnv(make_env("tanh-normal", (3,)), other), actor)
    assert_adjusted(steps, actor, before)
    other.update(steps)
    assert not torch.equal(other.coef, torch.tensor(COEF))
    # A clone within this process is the same controller; a pickled one is another.
    assert torch.equal(other.coef, transform.coef) is (copy == "clone")


def drop_container(transform):
    other = transform.clone()
    other.reset_parent()
    return other


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_the_action_is_the_policys_own(estimator):
    """For the environment action and observation become float64 before the step; the reference reads the policy's."""
    actor = make_actor("tanh-normal")
    transform = KLConstrainedTransform(actor, COEF, estimator=estimator, policy=frozen_twin(actor))
    double = make_env("tanh-normal", (3,), dtype=torch.float64)
    env = TransformedEnv(double, Compose(DoubleToFloat(), transform))
    check_env_specs(env)
    drift(actor)
    steps = play(env, actor)
    assert steps["next", "kl"].dtype == torch.float32
    again = transform.clone()(steps.exclude(*(("next", key) for key in WRITTEN[:-1])))
    torch.testing.assert_close(steps["next", "kl"], again["next", "kl"], rtol=1e-4, atol=1e-5)


def test_environments_that_reset_themselves():
    """TorchRL tells by a hook which rows have been reset; they alone begin anew."""
    transform, actor, _ = drifted(limit=1e6)
    env = TransformedEnv(make_env("tanh-normal", (3,)), transform)
    with torch.no_grad():
        ahead = env.step(actor(env.reset()))["next"]
    ahead["_reset"] = torch.tensor([[False], [True], [False]])
    before = ahead.clone()
    after = env.transform._reset_on_native_autoreset(ahead, ahead)
    for key in ("kl", "episode_kl", "ref_log_prob", "raw_reward"):
        assert (before[key] != 0).all()
        assert ((after[key] == 0).flatten() == torch.tensor([False, True, False])).all()


class Doubled(Transform):
    """The environment gets twice what stands in the data, by default the policy's action."""

    def __init__(self, key="action"):
        super().__init__(in_keys_inv=[key], out_keys_inv=[key])

    def _inv_apply_transform(self, value):
        return 2 * value


@pytest.mark.parametrize("estimator", ["k1", "exact"])
@pytest.mark.parametrize("behind", [lambda t: Compose(t, Doubled()), lambda t: Compose(Compose(t), Compose(Doubled()))])
def test_a_transform_of_actions_behind_is_refused(behind, estimator):
    """It would double the action before the reference sees it."""
    actor = make_actor("independent-normal")
    transform = KLConstrainedTransform(actor, estimator=estimator, policy=actor)
    with pytest.raises(ValueError, match=r"Doubled changes the action 'action'.*put it before"):
        TransformedEnv(make_env("independent-normal", (3,)), behind(transform)).reset()
    before = TransformedEnv(make_env("independent-normal", (3,)), Compose(Doubled(), transform.clone()))
    kl = play(before, actor)["next", "kl"]
    torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-5, rtol=0)


def test_the_first_step_after_appending_reads_the_policys_action():
    """Without a reset in between, which would build the specs."""
    actor = make_actor("independent-normal")
    env = TransformedEnv(make_env("independent-normal", (3,)), Doubled())
    with torch.no_grad():
        td = actor(env.reset())
        env.append_transform(KLConstrainedTransform(actor))
        kl = env.step(td)["next", "kl"]
    torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_changed_reference_is_found_at_a_reset():
    """Where the step is compiled and does not look."""
    actor = make_actor("tanh-normal")
    shared = next(iter(actor.parameters())).requires_grad_(False)
    env = TransformedEnv(make_env("tanh-normal", (3,)), KLConstrainedTransform(actor, limit=1.0))
    step, td = compiled_step(env, actor)
    with torch.no_grad():
        shared.add_(1.0)
        step(td)
    with pytest.raises(RuntimeError, match="The reference changed"):
        env.reset()
