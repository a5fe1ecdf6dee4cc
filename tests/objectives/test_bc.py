"""Behaviour cloning: numbers by hand, both normalisers, actors with and without a head of their own."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch.distributions import Categorical

from tests.objectives.models import by_hand, make_actor, make_bc, make_rows
from torchrl_lang.functional import categorical_kl, decision_mask
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.objectives import BCLoss
from torchrl_lang.transforms import ConstantKLController, frozen_copy


def headless():
    """An actor that finds its logits in the input."""
    return ProbabilisticTensorDictSequential(
        TensorDictModule(torch.nn.Identity(), in_keys=["table"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["next_token"], distribution_class=Categorical),
    )


def two_symbols():
    """Tokens 0 1 0 1 and padding; the agent wrote positions 1 and 3; two symbols, p(1) = 3/4 everywhere."""
    logits = torch.tensor([0.0, math.log(3.0)]).expand(1, 5, 2)
    rows = by_hand([[0, 1, 0, 1, 0]], [[0, 1, 0, 1, 0]], table=logits)
    return rows.set("attention_mask", torch.arange(5)[None] < 4)


A, B = math.log(4 / 3), math.log(4)  # cross-entropy of symbol 1 and of symbol 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 2 * A / 3),  # three real tokens follow another
        ({"actor_normalizer": "action"}, A),
        ({"transition_weight": 0.5}, (2 * A + 0.5 * B) / 3),
        ({"transition_weight": 1.0, "reduction": "sum"}, 2 * A + B),
    ],
)
def test_numbers_by_hand(options, expected):
    assert BCLoss(headless(), **options)(two_symbols())["loss_actor"].item() == pytest.approx(expected)


def test_reduction_none_puts_each_loss_at_its_decision():
    out = BCLoss(headless(), reduction="none", transition_weight=1.0)(two_symbols())["loss_actor"]
    torch.testing.assert_close(out, torch.tensor([[A, B, A, 0.0, 0.0]]))


def dense_logits(actor, rows):
    trunk, head, _ = split_actor(actor)
    return head.module(trunk.module(rows["tokens"], rows["attention_mask"]))


@pytest.mark.parametrize("weight", [0.1, ConstantKLController(0.25)], ids=["number", "controller"])
def test_divergence_from_a_reference(weight):
    """``loss_kl`` is the weight times the exact divergence of the decisions' distributions; no other figure moves."""
    rows, actor, other = make_rows(), make_actor().double(), make_actor(seed=5).double()
    reference, number = frozen_copy(other), 0.1 if weight == 0.1 else 0.25
    decision = decision_mask(rows["agent_mask"])
    kl = categorical_kl(dense_logits(actor, rows), dense_logits(other, rows))[decision]
    plain, exact = BCLoss(actor)(rows)["loss_actor"], {"rtol": 1e-12, "atol": 1e-12}
    for reduction, expected in (("sum", kl.sum()), ("mean", kl.mean())):
        out = BCLoss(actor, kl_weight=weight, reference=reference, reduction=reduction)(rows)
        torch.testing.assert_close(out["loss_kl"], number * expected, **exact)  # 0.1 is not rounded to float32
        torch.testing.assert_close(out["kl"], kl.mean().detach(), **exact)
    torch.testing.assert_close(out["loss_actor"], plain)
    dense = BCLoss(actor, kl_weight=weight, reference=reference, reduction="none")(rows)["loss_kl"]
    torch.testing.assert_close(dense[decision], number * kl, **exact)
    assert (dense[~decision] == 0).all()


def test_a_reference_and_its_weight_come_together():
    with pytest.raises(ValueError, match="give both or none"):
        BCLoss(make_actor(), reference=frozen_copy(make_actor()))
    assert make_bc().out_keys == ["loss_actor"]
    both = {"kl_weight": 0.1, "reference": frozen_copy(make_actor())}
    assert BCLoss(make_actor(), **both).out_keys == ["loss_actor", "loss_kl", "kl"]
