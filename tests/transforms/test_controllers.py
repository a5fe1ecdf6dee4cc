"""Controllers of the KL coefficient: their rules in numbers, their sign, where they lead, what they refuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchrl_lang.modules.controllers import (
    AdaptiveKLController,
    ConstantKLController,
    KLController,
    LagrangeKLController,
    ScheduledKLController,
    as_controller,
)

MAKERS = {
    "constant": lambda: ConstantKLController(0.3),
    "scheduled": lambda: ScheduledKLController([(2, 1.0), (10, 0.2)]),
    "adaptive": lambda: AdaptiveKLController(0.3, target=2.0, horizon=20),
    "lagrange": lambda: LagrangeKLController(0.3, target=2.0, proportional=0.05),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def coef_of(controller):
    value = controller()
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.device.type == "cpu"
    return float(value)


# Knots (10, 1.0), (20, 0.0), (40, 0.5): on them, before, between and after.
@pytest.mark.parametrize(
    ("seen", "expected"),
    [(1, 1.0), (10, 1.0), (12, 0.8), (20, 0.0), (25, 0.125), (40, 0.5), (41, 0.5), (10**12, 0.5)],
)
@pytest.mark.parametrize("kl", [0.0, 50.0])
def test_schedule_is_linear_between_knots(seen, expected, kl):
    controller = ScheduledKLController([(10, 1.0), (20, 0.0), (40, 0.5)])
    assert coef_of(controller) == 1.0
    controller.update(kl, n=seen)
    assert int(controller.step) == seen
    assert coef_of(controller) == pytest.approx(expected)


# coef 0.5, target 2, horizon 100, clip 0.2.
@pytest.mark.parametrize(
    ("kl", "n", "expected"),
    [
        (2.0, 50, 0.5),  # on target
        (2.2, 50, 0.525),  # error 0.1, half a horizon
        (9.0, 50, 0.55),  # error clipped to 0.2
        (1.8, 50, 0.475),  # error -0.1
        (0.0, 50, 0.45),  # error -1 clipped to -0.2
        (-1.0, 50, 0.45),  # an estimate below 0
        (9.0, 1, 0.501),  # one episode: 1 + 0.2 / 100
        (9.0, 100, 0.6),
        (9.0, 10**9, 0.6),  # one horizon at most
        (0.0, 10**9, 0.4),
    ],
)
def test_adaptive_rule(kl, n, expected):
    controller = AdaptiveKLController(0.5, target=2.0, horizon=100)
    controller.update(kl, n)
    assert coef_of(controller) == pytest.approx(expected)


def test_adaptive_stays_within_its_bounds_and_comes_back():
    controller = AdaptiveKLController(0.5, target=1.0, horizon=1, min_coef=0.25, max_coef=0.75)
    for kl, bound, back in ((9.0, 0.75, 0.6), (0.0, 0.25, 0.3)):
        for _ in range(20):
            controller.update(kl)
        assert coef_of(controller) == bound
        controller.update(0.0 if kl > 1 else 9.0)
        assert coef_of(controller) == pytest.approx(back)


# target 2, lr 0.1, proportional 0.5: lambda and the coefficient after each update.
def test_lagrange_rule():
    controller = LagrangeKLController(0.2, target=2.0, lr=0.1, proportional=0.5, max_coef=1.5)
    table = [
        (4.0, 0.4, 1.4),  # 0.2 + 0.1 * 2; 0.4 + 0.5 * 2
        (2.0, 0.4, 0.4),
        (1.0, 0.3, 0.0),  # 0.3 - 0.5 is below 0
        (-2.0, 0.0, 0.0),  # 0.3 - 0.4 is below 0: lambda stays where it can rise from
        (3.0, 0.1, 0.6),
        (100.0, 1.5, 1.5),  # both at the bound
        (1.0, 1.4, 0.9),
    ]
    for kl, multiplier, coef in table:
        controller.update(kl, n=64)
        assert float(controller.multiplier) == pytest.approx(multiplier)
        assert coef_of(controller) == pytest.approx(coef, abs=1e-6)


@pytest.mark.parametrize(
    "move",
    [
        lambda module: module.to("meta"),
        lambda module: module.half(),
        lambda module: module.to_empty(device="meta"),
        pytest.param(lambda module: module.cuda(), marks=pytest.mark.skipif("not torch.cuda.is_available()")),
    ],
    ids=["meta", "half", "to_empty", "cuda"],
)
def test_buffers_stay_on_the_host_in_their_dtype(make, move):
    controller = make()
    before = {name: (id(buffer), buffer.dtype, buffer.device) for name, buffer in controller.named_buffers()}
    around = move(nn.Sequential(controller, nn.Linear(1, 1)))
    after = {name: (id(buffer), buffer.dtype, buffer.device) for name, buffer in around[0].named_buffers()}
    assert after == before
    controller.update(3.0)
    assert not controller.shared


@pytest.mark.parametrize(
    "kl",
    [math.nan, math.inf, -math.inf, 1e39, torch.tensor(math.nan)],
    ids=str,
)
def test_a_bad_kl_is_refused_and_changes_nothing(make, kl):
    controller = make()
    before = {name: value.clone() for name, value in controller.state_dict().items()}
    with pytest.raises(ValueError, match=r"kl must .*got"):
        controller.update(kl)
    torch.testing.assert_close(controller.state_dict(), before, rtol=0, atol=0)


def test_a_rule_of_ones_own():
    class Halving(KLController):
        def _update(self, kl, n):
            self.coef.fill_(float(self.coef) / 2**n)

    controller = Halving(1.0)
    controller.update(0.0, 3)
    assert coef_of(controller) == 0.125


def test_a_controller_stays_itself_and_anything_else_is_refused(make):
    controller = make()
    assert as_controller(controller) is controller
    with pytest.raises(TypeError, match="str"):
        as_controller("0.1")


BAD = [
    (ConstantKLController, [(-0.1,), (math.nan,), (1e39,)]),
    (ScheduledKLController, [([],), ([(-1, 0.0), (2, 1.0)],), ([(3, 0.0), (2, 1.0)],), ([(0, 0.0), (2, -1.0)],)]),
    (AdaptiveKLController, [(0.0, 1.0), (0.1, 0.0), (0.1, 1.0, 0), (0.1, 1.0, 1, 1.0), (0.1, 1.0, 1, 0.2, 0.2)]),
    (LagrangeKLController, [(-1.0, 1.0), (0.1, -1.0), (0.1, 1.0, 0.0), (0.1, 1.0, 0.1, -1.0)]),
]
NAMES = {"AdaptiveKLController": ("target", "horizon", "clip", "min_coef"),
         "LagrangeKLController": ("target", "lr", "proportional")}  # fmt: skip


@pytest.mark.parametrize(("kind", "given"), [(kind, one) for kind, many in BAD for one in many], ids=str)
def test_bad_options_are_refused(kind, given):
    first, *rest = given
    with pytest.raises(ValueError, match=r"(coef|target|horizon|clip|lr|proportional|knots) must .*got"):
        kind(first, **dict(zip(NAMES.get(kind.__name__, ()), rest, strict=False)))
