"""Target networks compute without dropout: noise would be part of what they are to teach."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.objectives.conftest import VOCAB, WIDTH, make_actor, make_heads, make_ilql, make_qbackup, make_rows
from tests.objectives.utterances import make_utterance_ilql
from torchrl_lang.modules import QValueHead, UtteranceQValueHead, qvalue_module
from torchrl_lang.objectives import BCQLoss, CQLLoss, ILQLLoss, PsiLoss, UtteranceILQLLoss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")
OWN = {"target_trunk": True, "detach_qvalue": True}


def own_trunk():
    """A trunk of the values that applies dropout; the policy's does not."""
    trunk = make_actor(seed=3)[0]
    for module in trunk.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return trunk


def noisy(head):
    head = qvalue_module(head)
    for parameter in head.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return head


def head_alone():
    head = noisy(QValueHead(WIDTH, VOCAB, kind="residual", dropout=0.5))
    return ILQLLoss(make_actor(expose_pre_norm=True), head, make_heads()[1])


def head_of_utterances():
    head = noisy(UtteranceQValueHead(WIDTH, kind="residual", dropout=0.5))
    return UtteranceILQLLoss(make_actor(expose_pre_norm=True), head, make_heads()[1])


MAKE = {
    "trunk of ilql": (lambda: make_ilql(value_trunk=own_trunk(), **OWN), "target_qvalue", "qvalue"),
    "trunk of psi": (lambda: make_qbackup(PsiLoss, value_trunk=own_trunk(), **OWN), "td_target", "qvalue"),
    "head of ilql": (head_alone, "target_qvalue", "qvalue"),
    "head of utterances": (head_of_utterances, "target_qvalue", "qvalue"),
}


@pytest.mark.parametrize("name", MAKE)
def test_a_target_is_the_same_in_every_pass(name):
    make, of_target, online = MAKE[name]
    torch.manual_seed(0)
    loss, rows = make().train(), make_rows()
    for module in loss.actor_network.modules():  # GPT-2 has dropout of its own
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    first, second = loss(rows), loss(rows)
    torch.testing.assert_close(second[of_target], first[of_target])
    assert second[online] != first[online]
    assert all(module.training for module in loss.modules())


SHARED = {
    "ilql": (make_ilql, "target_qvalue"),
    "utterance-ilql": (lambda **options: make_utterance_ilql(make_actor(), **options), "target_qvalue"),
    "cql": (lambda **options: make_qbackup(CQLLoss, **options), "td_target"),
    "bcq": (lambda **options: make_qbackup(BCQLoss, **options), "td_target"),
    "psi": (lambda **options: make_qbackup(PsiLoss, **options), "td_target"),
    "bcq, trunks of its own": (
        lambda **options: make_qbackup(BCQLoss, value_trunk=make_actor(seed=3)[0], target_trunk=True, **options),
        "td_target",
    ),
}


def set_dropout(loss, rate):
    for module in loss.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(("rate", "training", "passes"), [(0.0, True, 0), (0.5, False, 0), (0.5, True, 1)])
def test_without_dropout_no_trunk_runs_a_second_time(name, rate, training, passes):
    loss, rows = SHARED[name][0]().train(training), make_rows()
    set_dropout(loss, rate)
    trunks = {id(trunk): trunk for trunk in (loss.actor_network[0], getattr(loss, "value_trunk", None)) if trunk}
    seen = []
    hooks = [trunk.register_forward_pre_hook(lambda *_: seen.append(1)) for trunk in trunks.values()]
    loss(rows)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(trunks) * (1 + passes) + getattr(loss, "has_target_trunk", False)
