"""What code around TorchRL's old ``KLRewardTransform`` relies on: its coefficient, its keys, its copy's weights."""

from __future__ import annotations

import pytest
import torch
from tensordict import assert_allclose_td
from torchrl.data import LazyTensorStorage, ReplayBuffer, traj
from torchrl.envs import TransformedEnv

from tests.transforms import world
from torchrl_lang import transforms
from torchrl_lang.transforms import AdaptiveKLController, KLConstrainedTransform, KLRewardTransform

SETTERS = {
    "in place": lambda transform: transform.coef.fill_(0.7),
    "a tensor": lambda transform: setattr(transform, "coef", torch.tensor(0.7)),
    "a number": lambda transform: setattr(transform, "coef", 0.7),
    "a state": lambda transform: transform.load_state_dict(
        {key: torch.tensor(0.7) if key.endswith("coef") else value for key, value in transform.state_dict().items()}
    ),
}


@pytest.mark.parametrize("coef", [0.1, torch.tensor(0.1), AdaptiveKLController(0.1, target=1.0)], ids=str)
@pytest.mark.parametrize("way", SETTERS)
def test_the_coefficient_is_a_buffer_that_can_be_written(way, coef):
    actor = world.make_actor("tanh-normal")
    transform, before = KLRewardTransform(actor, coef), world.frozen_twin(actor)
    assert any(buffer is transform.coef for buffer in transform.buffers())
    SETTERS[way](transform)
    steps = world.play(TransformedEnv(world.make_env("tanh-normal", (3,)), transform), world.drift(actor))
    world.assert_adjusted(steps, actor, before, coef=0.7)
    (found,) = (float(value) for key, value in transform.state_dict().items() if key.endswith("coef"))
    assert found == pytest.approx(0.7)


def test_a_number_moves_with_the_transform_and_a_controller_stays():
    coefs = 0.5, AdaptiveKLController(0.5, target=1.0)
    number, controller = (KLRewardTransform(world.make_actor("normal"), coef) for coef in coefs)
    assert number.to(torch.float64).coef.dtype == torch.float64
    assert controller.to(torch.float64).coef.dtype == torch.float32
    assert number.to("meta").coef.is_meta
    assert not controller.to("meta").coef.is_meta


def test_a_coefficient_that_the_next_update_would_overwrite_is_not_set():
    adaptive = AdaptiveKLController(0.5, target=1.0, min_coef=0.25, max_coef=1.0)
    lagrange, scheduled = transforms.LagrangeKLController(0.5, target=1.0), transforms.ScheduledKLController([(0, 0.5)])
    for coef, value, match in (
        (0.5, -1.0, r"coef must lie in \[0, inf\), got -1"),
        (adaptive, 5.0, r"coef must lie in \[0.25, 1.0\], got 5"),
        (lagrange, 0.75, r"update of Lagrange.* overwrite coef=0.75: give the transform a"),
        (scheduled, 0.75, "update of Scheduled"),
    ):
        transform = KLRewardTransform(world.make_actor("normal"), coef)
        with pytest.raises(ValueError, match=match):
            transform.coef = value
        assert float(transform.coef) == 0.5


def test_as_many_adjusted_rewards_as_rewards():
    with pytest.raises(ValueError, match=r"numbers of in_keys and out_keys .*differ: got 1 .*\['a', 'b'\]"):
        KLRewardTransform(world.make_actor("normal"), 0.1, ["reward"], ["a", "b"])


def test_keys_are_what_is_read_and_written(kind):
    """On these entries alone it works, and it writes no others; the reward comes first."""
    transform, actor, _ = world.drifted(kind)
    steps = world.steps_of(actor, kind=kind)
    (reward, *read), written = transform.in_keys, transform.out_keys
    assert reward == written[0] == world.key_of(kind, "reward")
    given = steps.select(*read, ("next", *world.parts_of(reward)))
    out = transform(given)
    assert set(out["next"].keys(True, True)) == set(written)
    assert_allclose_td(out["next"], transform(steps)["next"].select(*written))
    for key in read:
        with pytest.raises(KeyError):
            transform(given.exclude(key))


def test_keys_of_the_parts():
    actor = world.make_actor("tanh-normal")
    exact = KLConstrainedTransform(actor, estimator="exact", policy=actor, out_keys="reward_kl", limit=1.0)
    assert exact.in_keys == ["reward", "observation", "action", "done"]
    assert exact.out_keys == ["reward_kl", "kl", "episode_kl", "done", "truncated"]
    reference = transforms.ReferenceModelLogProbTransform(actor)
    divergence = transforms.KLDivergenceTransform(mask_key="mask")
    reward = transforms.RewardAdjustmentTransform(kl_key="k", mask_key="m")
    assert (reference.in_keys, reference.out_keys) == (["observation", "action"], ["ref_log_prob"])
    assert (divergence.in_keys, divergence.out_keys) == (["action_log_prob", "ref_log_prob", "mask"], ["kl"])
    assert (reward.in_keys, reward.out_keys) == (["reward", "k"], ["reward", "raw_reward"])


@pytest.mark.parametrize("key", ["reward", "kl", "raw_reward"])
@pytest.mark.filterwarnings("ignore:No trajectory id")
def test_a_buffer_is_queried_by_what_the_transform_writes(key):
    """TorchRL fetches the entries that ``in_keys`` name and runs the transforms whose ``out_keys`` are asked for."""
    actor = world.make_actor("tanh-normal")
    buffer = ReplayBuffer(storage=LazyTensorStorage(24))
    buffer.append_transform(KLRewardTransform(actor, world.COEF))
    buffer.extend(world.steps_of(world.drift(actor), ()))
    means = [float(episode.data["next", key].mean()) for episode in buffer.query()]
    limit = sum(means) / len(means)
    found = buffer.query(getattr(traj, key).mean() > limit)
    assert [float(episode.data["next", key].mean()) for episode in found] == [mean for mean in means if mean > limit]


def test_a_copy_with_gradients_trains_and_is_saved():
    actor = world.make_actor("tanh-normal")
    transform = KLRewardTransform(actor, 0.5, requires_grad=True)
    copied = list(transform.parameters())
    assert [p.shape for p in copied] == [p.shape for p in actor.parameters()]
    assert not {id(p) for p in copied} & {id(p) for p in actor.parameters()}
    assert [key.rsplit(".", 1)[-1] for key in transform.state_dict()] == ["weight", "bias", "coef"]
    steps = actor(world.steps_of(actor).exclude("action", "action_log_prob"))
    optimizer = torch.optim.SGD(copied, lr=0.1)
    transform(steps)["next", "reward"].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in copied)
    optimizer.step()
    other = KLRewardTransform(actor, 0.5, requires_grad=True)
    kl = transform(steps)["next", "kl"]
    assert (other(steps)["next", "kl"] - kl).abs().max() > 1e-3
    other.load_state_dict(world.stored(transform.state_dict()))
    torch.testing.assert_close(other(steps)["next", "kl"], kl)
    other.to(torch.float64)
    assert {p.dtype for p in other.parameters()} == {torch.float64}
    assert other.train()(steps.to(torch.float64))["next", "kl"].dtype == torch.float64
    assert not list(KLRewardTransform(actor, 0.5).parameters())
