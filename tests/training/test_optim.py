from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.training import adamw, muon_adamw, warmup_cosine


def test_only_matrices_decay_and_nothing_is_taken_twice():
    parts = {"wte": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "body": nn.Linear(4, 4), "out": nn.Linear(4, 7, False)}
    net = nn.ModuleDict(parts | {"frozen": nn.Linear(4, 4).requires_grad_(False)})
    net["out"].weight = net["wte"].weight
    decayed, others = adamw([net, net["out"]], 1e-3, weight_decay=0.1).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [id(p) for p in decayed["params"]] == [id(net["body"].weight)]
    expected = [net["wte"].weight, *net["norm"].parameters(), net["body"].bias]
    assert [id(p) for p in others["params"]] == [id(p) for p in expected]
    head = QValueHead(4, 5, kind="deep")  # the norms of stacked heads do not decay
    names = {id(p): name for name, p in head.named_parameters()}
    decayed, others = ({names[id(p)] for p in group["params"]} for group in adamw(head, 1e-3).param_groups)
    assert decayed == {"in_weight", "mid_weight", "out_weight"}
    assert others == set(names.values()) - decayed


@pytest.mark.parametrize(("device", "fused"), [("cpu", True), ("meta", False)])
def test_one_kernel_updates_parameters_where_it_can(device, fused):
    assert adamw(nn.Linear(2, 2, device=device), 1e-3).defaults["fused"] is fused


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
    groups = adamw(modules, 0.01, rates=[(head, 0.1)]).param_groups
    assert [group["lr"] for group in groups] == [0.01, 0.01, 0.1, 0.1]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0, 0.01, 0.0]
    assert adamw(head, 0.01, rates=[(head, 0.1)]).param_groups[0]["lr"] == 0.1
    for wrong, rate in ((modules, -0.1), (trunk, 0.1)):
        with pytest.raises(ValueError, match="rate"):
            adamw(wrong, 0.01, rates=[(head, rate)])
    with pytest.raises(ValueError, match="empty parameter list"):
        adamw(trunk.requires_grad_(False), 0.1)


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


# -- Muon beside AdamW -------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3))


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.arange(7)).square().sum().backward()
    optimizer.step()


def test_a_step_is_that_of_both_apart():
    net, twin = model(), model()
    step(net, muon_adamw(net, 1e-2, muon_lr=0.1, weight_decay=0.0))
    matrices = [twin[1].weight, twin[4].weight]
    others = [p for p in twin.parameters() if all(p is not m for m in matrices)]
    muon = Muon(matrices, lr=0.1, momentum=0.95, weight_decay=0.0)
    parts = muon, AdamW(others, lr=1e-2, betas=(0.9, 0.99), weight_decay=0)
    twin(torch.arange(7)).square().sum().backward()
    for part in parts:
        part.step()
    for left, right in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_every_parameter_is_in_one_part_and_resumed_is_as_if_never_stopped():
    def matrices(modules):
        return [id(p) for p in muon_adamw(modules, 1e-2).parts[1].param_groups[0]["params"]]

    net = model()
    optimizer = muon_adamw(net, 1e-2)
    taken = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(taken) == sorted(id(p) for p in net.parameters())
    assert matrices(net) == matrices(m for m in [net, net]) == [id(net[1].weight), id(net[4].weight)]
    warmup_cosine(optimizer, 10, warmup=2)  # a schedule reaches both
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.005, 0.05]
    for _ in range(3):
        step(net, optimizer)
    twin = copy.deepcopy(net)
    resumed = muon_adamw(twin, 1e-2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups]
    for _ in range(3):
        step(net, optimizer)
        step(twin, resumed)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    net[1].weight.requires_grad_(False)
    assert matrices([net, net]) == [id(net[4].weight)]
    with pytest.raises(ValueError, match="use adamw"):
        muon_adamw(net[3], 1e-3)


@pytest.mark.parametrize("vocabulary", [12, 16])  # of another size than the trunk's width, and as wide
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_of_a_loss_only_the_trunks_linear_layers_go_to_muon(kind, vocabulary):
    """Not embeddings, an untied output head, or the stacked biases of value heads, which have two dimensions."""
    tied = {} if vocabulary == 12 else {"tie_word_embeddings": False}
    lm = causal_lm(kind, vocab_size=vocabulary, layers=2, width=16, heads=2, max_length=8, **tied)
    loss = ILQLLoss(language_actor(lm), qvalue_module(QValueHead(16, vocabulary)), value_module(ValueHead(16)))
    optimizer = muon_adamw([loss, nn.Linear(16, 3)], 1e-3)
    names = {id(p): name for name, p in loss.named_parameters()}
    chosen = {names[id(p)] for p in optimizer.parts[1].param_groups[0]["params"]}
    assert len(chosen) == (4 if kind == "gpt2" else 7) * 2
    assert all(".h." in name or ".layers." in name for name in chosen)
    decayed = {names.get(id(p), "") for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert not any(name.endswith("bias") or "wte" in name or "embed_tokens" in name for name in decayed)
