"""Which parts of a loss get a gradient, and how often it runs a language model."""

from __future__ import annotations

from functools import partial

import pytest

from tests.objectives import models
from tests.objectives.models import make_bcq, make_cql, make_ilql, make_oreo, make_psi, make_utterance_ilql, own_trunk
from torchrl_lang.transforms import frozen_copy

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
QBACKUP = {"cql": make_cql, "bcq": make_bcq, "psi": make_psi}
READ = {"ilql": make_ilql, "utterance": make_utterance_ilql, **QBACKUP}
RESTING = {"actor_weight": 0.0}


def test_one_pass_of_the_trunk_and_one_per_trunk_asked_for(passes):
    """Whether gradients are on in each pass, those without first."""
    for make in READ.values():
        assert passes(make()) == [True]
        if make is not make_utterance_ilql:
            assert passes(make(target_trunk=True)) == [False, True]
            assert passes(own_trunk(make)) == [True, True]
            assert passes(own_trunk(make, target_trunk=True)) == [False, True, True]
    with_prior = partial(make_psi, prior=frozen_copy(models.make_actor()))
    for make, number in ((make_ilql, 1), (make_cql, 1), (make_bcq, 2), (make_psi, 2), (with_prior, 2)):
        assert len(passes(own_trunk(make, **RESTING))) == number  # the policy rests, but as a constraint or a prior
    assert passes(with_prior()) == [False, True]
    assert passes(make_oreo(transition_weight=0.5)) == [False, True]
    assert passes(own_trunk(make_oreo)) == [False, True, True]
    assert passes(own_trunk(models.make_archer)) == [True]  # of the values alone
    # The target, the reference, the model.
    assert passes(models.make_qsft(transition_weight=0.5)) == [False, False, True]
    assert passes(models.make_chai(), models.rows_for("chai")) == []


def touched(loss, *terms):
    """Parts of the loss that get a gradient from the sum of the given terms."""
    loss.zero_grad()
    out = loss(models.make_rows())
    sum(out[term] for term in terms).backward()
    parts = {"qvalue_network_params": "q", "value_network_params": "v", "value_network": "v", "value_trunk": "trunk"}
    trained = [name for name, p in loss.named_parameters() if p.grad is not None and p.grad.any()]
    return {next((part for key, part in parts.items() if name.startswith(key)), "actor") for name in trained}


@pytest.mark.parametrize("make", [make_ilql, *QBACKUP.values()])
def test_gradients_go_where_they_belong(make):
    """Without options: ``test_each_term_trains_its_networks_and_their_sum_all``."""
    loss = make(detach_qvalue=True)
    assert touched(loss, *(key for key in ("loss_qvalue", "loss_cql") if key in loss.out_keys)) == {"q"}
    assert touched(own_trunk(make), "loss_qvalue") == {"q", "trunk"}  # nothing flows from targets into the policy


def test_gradients_of_the_values_and_of_consistency():
    assert touched(make_ilql(detach_value=True), "loss_value") == {"v"}
    assert touched(own_trunk(make_oreo), "loss_value") == {"v", "trunk"}
    assert touched(own_trunk(make_oreo, kl_weight=1.0), "loss_actor", "loss_kl") == {"actor"}
    assert touched(make_oreo(), "loss_value") == {"v", "actor"}
    assert touched(make_oreo(detach_value=True), "loss_value") == {"v"}


@pytest.mark.parametrize("name", READ)
def test_a_term_of_weight_zero_is_zero(name):
    loss = READ[name]()
    for key in loss.out_keys:
        if key.startswith("loss_"):
            setattr(loss, key.removeprefix("loss_") + "_weight", 0.0)
    out = loss(models.make_rows())
    assert float(models.total(out)) == 0.0
    if name in QBACKUP:
        assert out["qvalue"].isnan()
        assert out["td_target"].isnan()
