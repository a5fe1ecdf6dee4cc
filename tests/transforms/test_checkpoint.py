"""What a checkpoint knows of a reference and of a controller."""

from __future__ import annotations

import io

import pytest
import torch
from torchrl.envs import StepCounter, TransformedEnv

from tests.transforms.conftest import drift, frozen_twin, make_actor, make_env, play
from torchrl_lang.transforms import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    LagrangeKLController,
    ReferenceModelLogProbTransform,
    ScheduledKLController,
)


def make_transform(seed=0, coef=0.3, **options):
    return KLConstrainedTransform(make_actor("tanh-normal", seed), coef, **options)


def make_transformed(transform):
    env = TransformedEnv(make_env("tanh-normal", (3,)), StepCounter())
    return env.append_transform(transform)


def stored(state):
    """Through a file, without pickle."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_is_a_fingerprint_and_a_coefficient():
    transform = make_transform()
    assert set(transform.state_dict()) == {"transforms.0.reference_fingerprint", "transforms.2.controller.coef"}
    assert list(transform.parameters()) == []
    assert len(list(transform.buffers())) == 1


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


def test_a_state_without_a_fingerprint():
    transform = make_transform()
    state = {key: value for key, value in transform.state_dict().items() if "fingerprint" not in key}
    with pytest.raises(RuntimeError, match=r"Missing key.*reference_fingerprint"):
        transform.load_state_dict(state)
    result = transform.load_state_dict(state, strict=False)
    assert result.missing_keys == ["transforms.0.reference_fingerprint"]


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


@pytest.mark.parametrize("embed", [False, True])
@pytest.mark.parametrize("make_other", [lambda: KLConstrainedTransform("ref_log_prob"), KLDivergenceTransform])
def test_a_transform_without_a_model_says_that_it_expected_none(make_other, embed):
    """The keys of a model must not vanish unseen where the second run has none."""
    other = make_other()
    single = isinstance(other, KLDivergenceTransform)
    transform = make_transform(embed_weights=embed)
    state = (transform.transforms[0] if single else transform).state_dict()
    theirs = {key for key in state if "reference" in key}
    assert len(theirs) == (1 + 2 if embed else 1)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*reference_fingerprint"):
        other.load_state_dict(state)
    assert set(other.load_state_dict(state, strict=False).unexpected_keys) == theirs


def test_embedded_weights_that_changed_on_the_way_are_refused():
    state, other = stored(make_transform(0, embed_weights=True).state_dict()), make_transform(1, embed_weights=True)
    before = {name: value.clone() for name, value in other.transforms[0].reference.frozen.state().items()}
    name = next(key for key in state if "reference_weights." in key)
    with pytest.raises(RuntimeError, match="not those that were saved"):
        other.load_state_dict({**state, name: state[name] + 1e-3})
    after = other.transforms[0].reference.frozen.state()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    other.load_state_dict(dict(reversed(state.items())))  # in any order


def test_a_reference_that_changed_is_not_saved():
    actor = make_actor("tanh-normal")
    next(iter(actor.parameters())).requires_grad_(False)
    transform = ReferenceModelLogProbTransform(actor)
    transform.state_dict()
    drift(actor)
    with pytest.raises(RuntimeError, match="The reference changed"):
        transform.state_dict()
