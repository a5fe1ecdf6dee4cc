"""Actors with a memory: as policies they are run on the state they acted on; as references only with a state of own."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.envs import Compose
from torchrl.modules import GRUModule, LSTMModule, ProbabilisticActor, TanhNormal

from tests.transforms.conftest import drift, frozen_twin, make_recurrent, play, recurrent_env
from torchrl_lang.transforms import KLConstrainedTransform, ReferenceModelLogProbTransform, as_reference
from torchrl_lang.transforms.references import as_policy


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_policys_state_is_not_taken_for_the_references(cell):
    with pytest.raises(ValueError, match=r"recurrent_state.*would be the policy's.*in_keys="):
        KLConstrainedTransform(make_recurrent(cell))


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_policy_is_run_on_the_state_that_it_acted_on(cell):
    actor = make_recurrent(cell)
    steps = play(recurrent_env(actor, (3,)), actor, 9)
    assert (steps["recurrent_state_h" if cell == "lstm" else "recurrent_state"] != 0).any()
    found = as_policy(actor).log_prob(steps, steps)
    torch.testing.assert_close(found, steps["action_log_prob"], rtol=1e-4, atol=1e-4)


STATES = {"lstm": ("h", "c"), "gru": ("h",)}


def with_own_state(cell, actor):
    """The actor as it is now, with its state and parameters under ``"ref"``."""
    twin = frozen_twin(actor)
    keys = [("ref", name) for name in STATES[cell]]
    memory, head = (module for module in twin.module[0].module)
    module = {"lstm": LSTMModule, "gru": GRUModule}[cell]
    own = module(
        **{cell: getattr(memory, cell)},
        in_keys=["observation", *keys],
        out_keys=[("ref", "features"), *(("next", *key) for key in keys)],
    )
    parameters = [("ref", "loc"), ("ref", "scale")]
    net = TensorDictModule(head.module, in_keys=[("ref", "features")], out_keys=parameters)
    return ProbabilisticActor(
        TensorDictSequential(own, net),
        in_keys=dict(zip(("loc", "scale"), parameters, strict=True)),
        distribution_class=TanhNormal,
    )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_reference_with_a_state_of_its_own_beside_the_policy(cell):
    """It runs as a part of the policy, which leaves its state in the data; then its keys are named."""
    actor = make_recurrent(cell)
    reference = with_own_state(cell, actor)
    beside = TensorDictSequential(*reference.module[0].module)
    drift(actor, 0.3)
    policy = TensorDictSequential(beside, actor)
    primers = Compose(beside[0].make_tensordict_primer())
    steps = play(recurrent_env(actor, (3,), [primers]), policy, 9)
    keys = ["observation", "is_init", *(("ref", name) for name in STATES[cell])]
    out = ReferenceModelLogProbTransform(as_reference(reference, in_keys=keys))(steps)
    loc, scale = steps["ref", "loc"], steps["ref", "scale"]
    expected = TanhNormal(loc, scale).log_prob(steps["action"])
    torch.testing.assert_close(out["next", "ref_log_prob"], expected, rtol=1e-4, atol=1e-4)
    assert (expected - steps["action_log_prob"]).abs().mean() > 0.01
