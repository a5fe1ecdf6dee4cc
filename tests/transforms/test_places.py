"""One actor, every place where a transform can stand: the same data give the same numbers."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
from tensordict import assert_allclose_td
from torchrl.collectors import Collector
from torchrl.data import Bounded, LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, Unbounded
from torchrl.envs import Compose, DoubleToFloat, ParallelEnv, SerialEnv, StepCounter, Transform, TransformedEnv
from torchrl.envs.utils import check_env_specs

from tests.transforms import world
from torchrl_lang import transforms
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, KLRewardTransform

WRITTEN = ["ref_log_prob", "kl", "raw_reward", "reward"]


@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_environment_and_batch_agree(kind, batch):
    transform, actor, _ = world.drifted(kind)
    called = transform(world.steps_of(actor, batch, kind))
    stepped = world.play(TransformedEnv(world.make_env(kind, batch), transform), actor)
    assert_allclose_td(stepped["next"], called["next"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(3,), (1, 3)])
@pytest.mark.parametrize("by_itself", [True, False])
def test_reset_writes_zeros_and_partial_resets_leave_the_rest(by_itself, batch):
    """Also where TorchRL tells by a hook which rows of an environment have been reset."""
    transform, actor, _ = world.drifted(limit=1e6)
    env = TransformedEnv(world.make_env("tanh-normal", batch), transform)
    keys = ("kl", "episode_kl", "ref_log_prob", "raw_reward")
    td = env.reset()
    assert all((td[key] == 0).all() for key in keys)
    with torch.no_grad():
        ahead = env.step(actor(td))["next"]
    ahead["_reset"] = torch.tensor([False, True, False]).reshape(*batch, 1)
    before = ahead.clone()
    after = env.transform._reset_on_native_autoreset(ahead, ahead) if by_itself else env.reset(ahead)
    for key in keys:
        assert (before[key] != 0).all()
        assert torch.equal(after[key], before[key] * ~before["_reset"].view_as(before[key]))


@pytest.mark.parametrize("batched", [SerialEnv, ParallelEnv])
def test_within_a_worker_is_refused(batched):
    with pytest.raises(RuntimeError, match="goes over SerialEnv"):
        batched(2, lambda: within(KLRewardTransform(world.make_actor("tanh-normal")))).reset()


def test_over_parallel_env():
    transform, actor, before = world.drifted(missing="zero")
    workers = ParallelEnv(2, functools.partial(world.make_env, "tanh-normal", (2,)), mp_start_method="fork")
    env = TransformedEnv(workers, transform)
    try:
        check_env_specs(env)
        steps = world.play(env, actor, 6)
    finally:
        env.close()
    assert steps.batch_size == (2, 2, 6)
    world.assert_adjusted(steps, actor, before)


def test_collector_as_env_transform_and_as_postproc():
    transform, actor, before = world.drifted()
    collected = []
    options = {"frames_per_batch": 24, "total_frames": 48, "auto_register_policy_transforms": False}
    for place in ("env", "postproc"):
        plain = world.make_env("tanh-normal", (3,), seed=1)
        env = TransformedEnv(plain, transform.clone()) if place == "env" else plain
        torch.manual_seed(0)
        collector = Collector(env, actor, postproc=transform if place == "postproc" else None, **options)
        collected.append([batch.clone() for batch in collector])
        collector.shutdown()
    for inside, behind in zip(*collected, strict=True):
        world.assert_adjusted(inside, actor, before)
        assert_allclose_td(inside.select("next"), behind.select("next"), rtol=1e-5, atol=1e-5)
        assert set(inside.keys(True, True)) - set(behind.keys(True, True)) == {"ref_log_prob", "kl", "raw_reward"}


STORAGES = {
    "sampling": lambda _: ListStorage(100),
    "sampling tensors": lambda _: LazyTensorStorage(100),
    "sampling from memory": lambda path: LazyMemmapStorage(100, scratch_dir=path),
    "extending": lambda _: LazyTensorStorage(100),
}


@pytest.mark.parametrize("when", STORAGES)
@pytest.mark.parametrize("kind", ["tanh-normal", "composite", "agents"])
def test_replay_buffer_in_both_directions(kind, when, tmp_path):
    """What is stored for sampling stays raw, so that a second sample is adjusted once, too."""
    transform, actor, _ = world.drifted(kind)
    steps = world.steps_of(actor, (3,), kind).reshape(-1)
    buffer = ReplayBuffer(storage=STORAGES[when](tmp_path), batch_size=16)
    buffer.append_transform(transform, invert=when == "extending")
    buffer.extend(steps)
    torch.manual_seed(1)
    names = ("observation", "reward", *WRITTEN[:3])
    observation, reward, *others = (("next", *world.parts_of(world.key_of(kind, name))) for name in names)
    for _ in range(2):
        sample = buffer.sample()
        if not isinstance(sample, type(steps)):
            sample = torch.stack(list(sample))
        raw = sample.exclude(*others)
        raw[reward] = raw[observation].sum(-1, keepdim=True)
        assert_allclose_td(sample, transform.clone()(raw.clone()), rtol=1e-5, atol=1e-5)
        assert (sample["next", *world.parts_of(world.key_of(kind, "kl"))] != 0).all()
    assert world.key_of(kind, "kl") not in steps["next"].keys(True)


def test_to_moves_the_reference_and_its_numbers():
    """In float64 the reference scores in float64; structure follows to the meta device; the policy stays."""
    transform, actor, before = world.drifted()
    transform.to(torch.float64)
    actor.to(torch.float64)
    steps = world.play(TransformedEnv(world.make_env("tanh-normal", (3,), dtype=torch.float64), transform), actor)
    assert steps["next", "ref_log_prob"].dtype == torch.float64
    assert steps["next", "kl"].dtype == torch.float64
    world.assert_adjusted(steps, actor, before.to(torch.float64))
    weights = transform.transforms[0].reference.frozen.state()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float64}
    transform.to("meta")
    weights = transform.transforms[0].reference.frozen.state()
    assert {tensor.device.type for tensor in weights.values()} == {"meta"}
    assert {p.device.type for p in actor.parameters()} == {"cpu"}


@pytest.mark.parametrize("copy", ["clone", "pickle"])
def test_copies_work_elsewhere(copy):
    transform, actor, before = world.drifted(coef=AdaptiveKLController(world.COEF, target=1.0))
    env = TransformedEnv(world.make_env("tanh-normal", (3,)), transform)
    world.play(env, actor, 2)
    other = transform.clone()
    if copy == "pickle":
        other.reset_parent()
        other = pickle.loads(pickle.dumps(other))  # noqa: S301
    assert type(other) is KLConstrainedTransform
    assert torch.equal(other.coef, transform.coef)
    steps = world.play(TransformedEnv(world.make_env("tanh-normal", (3,)), other), actor)
    world.assert_adjusted(steps, actor, before)
    other.update(steps)
    assert not torch.equal(other.coef, torch.tensor(world.COEF))
    # A clone within this process is the same controller; a pickled one is another.
    assert torch.equal(other.coef, transform.coef) is (copy == "clone")


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_the_action_is_the_policys_own(estimator):
    """For the environment action and observation become float64 before the step; the reference reads the policy's."""
    actor = world.make_actor("tanh-normal")
    transform = KLConstrainedTransform(actor, world.COEF, estimator=estimator, policy=world.frozen_twin(actor))
    double = world.make_env("tanh-normal", (3,), dtype=torch.float64)
    env = TransformedEnv(double, Compose(DoubleToFloat(), transform))
    check_env_specs(env)
    world.drift(actor)
    steps = world.play(env, actor)
    assert steps["next", "kl"].dtype == torch.float32
    again = transform.clone()(steps.exclude(*(("next", key) for key in WRITTEN[:-1])))
    torch.testing.assert_close(steps["next", "kl"], again["next", "kl"], rtol=1e-4, atol=1e-5)


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
    actor = world.make_actor("independent-normal")
    transform = KLConstrainedTransform(actor, estimator=estimator, policy=actor)
    with pytest.raises(ValueError, match=r"Doubled changes the action 'action'.*put it before"):
        TransformedEnv(world.make_env("independent-normal", (3,)), behind(transform)).reset()
    before = TransformedEnv(world.make_env("independent-normal", (3,)), Compose(Doubled(), transform.clone()))
    kl = world.play(before, actor)["next", "kl"]
    torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-5, rtol=0)


def test_the_first_step_after_appending_reads_the_policys_action():
    """Without a reset in between, which would build the specs."""
    actor = world.make_actor("independent-normal")
    env = TransformedEnv(world.make_env("independent-normal", (3,)), Doubled())
    with torch.no_grad():
        td = actor(env.reset())
        env.append_transform(KLConstrainedTransform(actor))
        kl = env.step(td)["next", "kl"]
    torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_changed_reference_is_found_at_a_reset():
    """Where the step is compiled and does not look."""
    actor = world.make_actor("categorical")
    shared = next(iter(actor.parameters())).requires_grad_(False)
    env = TransformedEnv(world.make_env("categorical", (3,)), KLConstrainedTransform(actor, limit=1.0))
    step, td = world.compiled_step(env, actor)
    with torch.no_grad():
        shared.add_(1.0)
        step(td)
    with pytest.raises(RuntimeError, match="The reference changed"):
        env.reset()


def within(transform):
    return TransformedEnv(world.make_env("tanh-normal", (3,)), StepCounter()).append_transform(transform)


def test_another_reference_raises():
    """Even a policy that has trained on, taken for its own reference after a restart."""
    actor = world.make_actor("tanh-normal")
    state = world.stored(within(KLConstrainedTransform(actor)).state_dict())
    world.drift(actor, 1e-3)
    with pytest.raises(RuntimeError, match="another reference model"):
        within(KLConstrainedTransform(actor)).load_state_dict(state)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_embedded_weights_restore_the_reference(estimator):
    """Of another seed: after loading both score alike."""
    options = {"estimator": estimator, "policy": world.make_actor("tanh-normal", 7), "embed_weights": True}
    first, second = (KLConstrainedTransform(world.make_actor("tanh-normal", seed), **options) for seed in (0, 1))
    actor = world.make_actor("tanh-normal", 2)
    steps = world.steps_of(actor)
    expected = first(steps)["next", "kl"]
    assert not torch.allclose(second(steps)["next", "kl"], expected)
    second.load_state_dict(world.stored(first.state_dict()))
    torch.testing.assert_close(second(steps)["next", "kl"], expected)


@pytest.mark.parametrize(
    "make_controller",
    [
        lambda: AdaptiveKLController(0.3, target=0.01, horizon=10),
        lambda: transforms.LagrangeKLController(0.3, target=0.01),
        lambda: transforms.ScheduledKLController([(0, 1.0), (1000, 0.0)]),
    ],
)
def test_the_controller_goes_on_where_it_was(make_controller):
    """A run in one piece and one that is resumed half-way have the same coefficients."""
    actor = world.make_actor("tanh-normal")
    policy = world.drift(world.frozen_twin(actor))

    def run(transform, seeds):
        seen = []
        for seed in seeds:
            steps = world.play(within(transform.clone()), policy, seed=seed)
            transform.update(steps)
            seen.append(float(transform.coef))
        return seen

    whole = run(KLConstrainedTransform(actor, make_controller()), range(4))
    assert len(set(whole)) == 4
    first = KLConstrainedTransform(actor, make_controller())
    begun = run(first, range(2))
    resumed = KLConstrainedTransform(actor, make_controller())
    resumed.load_state_dict(world.stored(first.state_dict()))
    assert [*begun, *run(resumed, range(2, 4))] == whole


def test_the_raw_reward_has_the_limits_that_the_reward_loses():
    env, actor = world.make_env("categorical", (2,)), world.make_actor("categorical")
    env.reward_spec = limited = Bounded(-1.0, 1.0, env.reward_spec.shape, dtype=torch.float64)
    env = TransformedEnv(env, KLRewardTransform(actor))
    assert env.full_observation_spec["raw_reward"] == limited
    assert env.reward_spec == Unbounded(limited.shape, dtype=torch.float64)


def test_a_second_penalty_of_one_reward_is_refused_before_the_first_step():
    env, actor = world.make_env("categorical", (2,)), world.make_actor("categorical")
    with pytest.raises(ValueError, match="was adjusted before"):
        _ = TransformedEnv(env, Compose(KLRewardTransform(actor), KLRewardTransform(actor))).output_spec
