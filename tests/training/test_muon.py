"""Muon beside AdamW as one optimiser."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor, qvalue_module, value_module
from torchrl_lang.objectives import ILQLLoss
from torchrl_lang.training import adamw, muon_adamw, warmup_cosine


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3))


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.arange(7)).square().sum().backward()
    optimizer.step()


def test_every_parameter_is_in_one_part():
    net = model()
    optimizer = muon_adamw(net, 1e-3)
    taken = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(taken) == sorted(id(p) for p in net.parameters())
    muon = {id(p) for p in optimizer.parts[1].param_groups[0]["params"]}
    assert muon == {id(net[1].weight), id(net[4].weight)}


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


def test_a_schedule_reaches_both():
    net = model()
    optimizer = muon_adamw(net, 1e-2)
    scheduler = warmup_cosine(optimizer, 10, warmup=2, final=0.0)
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.005, 0.05]
    for _ in range(10):
        step(net, optimizer)
        scheduler.step()
    before = copy.deepcopy(net.state_dict())
    step(net, optimizer)  # the rate is zero now
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_resumed_is_as_if_never_stopped():
    net = model()
    optimizer = muon_adamw(net, 1e-2)
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


def test_frozen_and_shared_parameters():
    net = model()
    net[1].weight.requires_grad_(False)
    assert len(muon_adamw([net, net], 1e-3).parts[1].param_groups[0]["params"]) == 1


def test_nothing_for_muon_is_said():
    with pytest.raises(ValueError, match="use adamw"):
        muon_adamw(nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2)), 1e-3)
    assert adamw(nn.LayerNorm(2), 1e-3)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_of_a_loss_only_the_trunks_linear_layers_go_to_muon(kind):
    """Not embeddings, an untied output head, or the stacked biases of value heads, which have two dimensions."""
    lm = causal_lm(kind, vocab_size=12, layers=2, width=16, heads=2, max_length=8)
    loss = ILQLLoss(language_actor(lm), qvalue_module(QValueHead(16, 12)), value_module(ValueHead(16)))
    optimizer = muon_adamw(loss, 1e-3)
    names = {id(p): name for name, p in loss.named_parameters()}
    chosen = {names[id(p)] for p in optimizer.parts[1].param_groups[0]["params"]}
    assert len(chosen) == (4 if kind == "gpt2" else 7) * 2
    assert all(".h." in name or ".layers." in name for name in chosen)
    decayed = {names[id(p)] for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert not any(name.endswith("bias") or "wte" in name or "embed_tokens" in name for name in decayed)


def test_modules_may_come_from_a_generator():
    net = model()
    assert len(muon_adamw((m for m in [net]), 1e-3).parts[1].param_groups[0]["params"]) == 2


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_trunk_as_wide_as_the_vocabulary_is_still_the_trunk(kind):
    lm = causal_lm(kind, vocab_size=16, layers=1, width=16, heads=2, max_length=8, tie_word_embeddings=False)
    probe = nn.Linear(16, 3)  # not of the trunk either
    optimizer = muon_adamw([lm, probe], 1e-3)
    names = {id(p): name for name, p in lm.named_parameters()} | {id(p): "probe" for p in probe.parameters()}
    chosen = {names[id(p)] for p in optimizer.parts[1].param_groups[0]["params"]}
    assert len(chosen) == (4 if kind == "gpt2" else 7)
    assert all(".h." in name or ".layers." in name for name in chosen)
