"""The moving average of weights: its numbers, what is averaged, and that training goes on with its own weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.objectives.models import make_ilql
from torchrl_lang.training import WeightAverage


def one_weight(value=0.0, dtype=torch.float32):
    net = nn.Linear(1, 1, bias=False, dtype=dtype)
    net.weight.data.fill_(value)
    return net


def average_of(average):
    with average.applied():
        return average.module.weight.item()


def test_numbers_by_hand():
    """From 0, with decays of 2/11, 3/12 and then 0.25: a, then b, then c."""
    net = one_weight()
    average = WeightAverage(net, decay=0.25)
    expected = 0.0
    for weight, decay in ((1.0, 2 / 11), (5.0, 3 / 12), (-2.0, 0.25)):
        net.weight.data.fill_(weight)
        average.update()
        expected = decay * expected + (1 - decay) * weight
        assert average_of(average) == pytest.approx(expected)
        assert net.weight.item() == weight
    last = WeightAverage(net, decay=0.0)
    net.weight.data.fill_(3.0)
    last.update()
    assert average_of(last) == 3.0
    again = WeightAverage(one_weight(), decay=0.25)
    again.load_state_dict(average.state_dict())
    for each in (average, again):
        each.module.weight.data.fill_(7.0)
        each.update()
    assert average_of(again) == average_of(average)
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="decay"):
            WeightAverage(net, decay)
    with pytest.raises(KeyError, match="bias"):
        WeightAverage(nn.Linear(1, 1), decay=0.5).load_state_dict(last.state_dict())


def test_an_average_of_half_precision_does_not_stand_still():
    """In bfloat16 a step of 1/1000 of the difference would be rounded away."""
    net = one_weight(1.0, torch.bfloat16)
    average = WeightAverage(net, decay=0.999)
    average.load_state_dict({"average": {"weight": torch.ones(1, 1)}, "steps": 100_000})
    net.weight.data.fill_(2.0)
    with pytest.raises(KeyboardInterrupt), average.applied():
        raise KeyboardInterrupt
    assert net.weight.item() == 2.0  # they come back after an error
    for _ in range(1000):
        average.update()
    assert average_of(average) == pytest.approx(2 - 0.999**1000, abs=0.01)


def test_a_loss_is_averaged_with_its_targets_but_not_its_frozen_weights():
    loss = make_ilql()
    for parameter in loss.actor_network.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    every = loss.actor_network.named_parameters(prefix="actor_network", remove_duplicate=False)
    frozen = {name for name, parameter in every if parameter.ndim > 1}
    average = WeightAverage(loss, decay=0.5)
    before = {name: weight.clone() for name, weight in loss.state_dict().items()}
    with torch.no_grad():
        for name, weight in loss.state_dict().items():
            weight.copy_(before[name] + 1)  # not added to: tied weights have two names
    with average.applied():
        for name, weight in loss.state_dict().items():
            torch.testing.assert_close(weight, before[name] + (name in frozen), msg=name)
    assert any("wte" in name for name in frozen)
    assert any("target_qvalue" in name for name in average.state_dict()["average"])
