"""What a checkpoint knows of a reference and of a controller."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import StepCounter, TransformedEnv

from tests.transforms.conftest import drift, frozen_twin, make_actor, make_env, play, stored
from torchrl_lang.transforms import (
    AdaptiveKLController,
    KLConstrainedTransform,
    LagrangeKLController,
    ScheduledKLController,
)


def make_transform(seed=0, coef=0.3, **options):
    return KLConstrainedTransform(make_actor("tanh-normal", seed), coef, **options)


def make_transformed(transform):
    env = TransformedEnv(make_env("tanh-normal", (3,)), StepCounter())
    return env.append_transform(transform)


def test_the_same_reference_loads_through_the_environment():
    env, other = make_transformed(make_transform()), make_transformed(make_transform())
    state = stored(env.state_dict())
    other.load_state_dict(state)
    after = other.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], state[key]) for key in state)


@pytest.mark.parametrize("strict", [True, False])
def test_another_reference_raises(strict):
    """Even a policy that has trained on, taken for its own reference after a restart."""
    actor = make_actor("tanh-normal")
    state = stored(make_transformed(KLConstrainedTransform(actor)).state_dict())
    drift(actor, 1e-3)
    with pytest.raises(RuntimeError, match="another reference model"):
        make_transformed(KLConstrainedTransform(actor)).load_state_dict(state, strict=strict)


@pytest.mark.parametrize("estimator", ["k1", "exact"])
def test_embedded_weights_restore_the_reference(estimator):
    """Of another seed: after loading both score alike, and the next checkpoint is the same."""
    options = {"estimator": estimator, "policy": make_actor("tanh-normal", 7), "embed_weights": True}
    first, second = make_transform(0, **options), make_transform(1, **options)
    actor = make_actor("tanh-normal", 2)
    steps = play(make_env("tanh-normal", (3,)), actor)
    expected = first(steps)["next", "kl"]
    assert not torch.allclose(second(steps)["next", "kl"], expected)
    state = stored(first.state_dict())
    second.load_state_dict(state)
    torch.testing.assert_close(second(steps)["next", "kl"], expected)
    again = second.state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], state[key]) for key in state)


@pytest.mark.parametrize(
    "make_controller",
    [
        lambda: AdaptiveKLController(0.3, target=0.01, horizon=10),
        lambda: LagrangeKLController(0.3, target=0.01),
        lambda: ScheduledKLController([(0, 1.0), (1000, 0.0)]),
    ],
)
def test_the_controller_goes_on_where_it_was(make_controller):
    """A run in one piece and one that is resumed half-way have the same coefficients."""
    actor = make_actor("tanh-normal")
    policy = drift(frozen_twin(actor))

    def run(transform, seeds):
        seen = []
        for seed in seeds:
            steps = play(make_transformed(transform.clone()), policy, seed=seed)
            transform.update(steps)
            seen.append(float(transform.coef))
        return seen

    whole = run(KLConstrainedTransform(actor, make_controller()), range(4))
    assert len(set(whole)) == 4
    first = KLConstrainedTransform(actor, make_controller())
    begun = run(first, range(2))
    resumed = KLConstrainedTransform(actor, make_controller())
    resumed.load_state_dict(stored(first.state_dict()))
    assert [*begun, *run(resumed, range(2, 4))] == whole
