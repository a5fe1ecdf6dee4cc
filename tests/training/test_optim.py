from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from torchrl_lang.modules import QValueHead
from torchrl_lang.training import adamw, warmup_cosine


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.wte.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def test_only_matrices_decay_and_nothing_is_taken_twice():
    model = Model()
    optimizer = adamw([model, model.head], 1e-3, weight_decay=0.1)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(model.body.weight)]
    expected = [model.wte.weight, model.norm.weight, model.norm.bias, model.body.bias]
    assert [id(p) for p in others["params"]] == [id(p) for p in expected]


def test_norms_of_stacked_heads_do_not_decay():
    head = QValueHead(4, 5, kind="residual")
    names = {id(p): name for name, p in head.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in adamw(head, 1e-3).param_groups)
    assert decayed == {"in_weight", "mid_weight", "out_weight"}
    assert others == set(names.values()) - decayed


def test_decay_by_hand():
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone()
    optimizer = adamw(layer, 0.1, weight_decay=0.5)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    bias = layer.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(layer.weight, before * (1 - 0.1 * 0.5))
    torch.testing.assert_close(layer.bias, bias)


@pytest.mark.parametrize("fused", [None, True, False])
def test_same_step_fused_or_not(fused):
    torch.manual_seed(0)
    layer, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain.load_state_dict(layer.state_dict())
    optimizers = adamw(layer, 0.1, fused=fused), torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    optimizers[0].param_groups[0]["weight_decay"] = 0.0
    for module, optimizer in zip((layer, plain), optimizers, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.eye(3)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(layer.weight, plain.weight)


def test_a_head_may_have_a_rate_of_its_own():
    """Sign by sign: a first step of Adam's moves every weight by its learning rate."""
    trunk, head = nn.Linear(3, 3), nn.Linear(3, 1)
    modules = nn.ModuleDict({"trunk": trunk, "head": head})
    optimizer = adamw(modules, 0.01, weight_decay=0.0, rates=[(head, 0.1)])
    before = {name: p.detach().clone() for name, p in modules.named_parameters()}
    for parameter in modules.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for name, p in modules.named_parameters():
        moved = 0.1 if name.startswith("head") else 0.01
        torch.testing.assert_close(before[name] - p, torch.full_like(p, moved))
    assert [
        (group["lr"], group["weight_decay"]) for group in adamw(modules, 0.01, rates=[(head, 0.1)]).param_groups
    ] == [(0.01, 0.01), (0.01, 0.0), (0.1, 0.01), (0.1, 0.0)]
    with pytest.raises(ValueError, match=r"must not be negative, got -0.1"):
        adamw(modules, 0.01, rates=[(head, -0.1)])
    with pytest.raises(ValueError, match="not among those to train"):
        adamw(trunk, 0.01, rates=[(head, 0.1)])


def test_nothing_to_train():
    with pytest.raises(ValueError, match="requires a gradient"):
        adamw(nn.Linear(1, 1).requires_grad_(False), 0.1)


def test_schedule():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = warmup_cosine(optimizer, 104, warmup=4, final=0.25)
    rates = []
    for _ in range(120):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[103:] == pytest.approx([0.5] * 17)
    assert rates[37] == pytest.approx(0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi / 3)))
    assert rates[4:] == sorted(rates[4:], reverse=True)
    with pytest.raises(ValueError, match="warmup"):
        warmup_cosine(optimizer, 3, warmup=3)
