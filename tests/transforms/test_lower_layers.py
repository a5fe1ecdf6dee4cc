from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.modules.toys import KINDS, rows
from torchrl_lang.modules import causal_lm, language_actor
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.frozen.frozen_copy import frozen_copy
from torchrl_lang.modules.frozen.lower_layers import (
    SharedLowerLayers,
    train_top_layers,
    transformer_blocks,
)

LAYERS = 4


def actor_of(kind, top=None, *, lm=None, **options):
    torch.manual_seed(0)
    config = {"vocab_size": 13, "layers": LAYERS, "width": 16, "heads": 2, "max_length": 20}
    actor = language_actor(causal_lm(kind, **config) if lm is None else lm, **options)
    if top is not None:
        train_top_layers(actor, top)
    return actor


def trunk_of(actor):
    return split_actor(actor).trunk.module


def both_of(actor):
    frozen = frozen_copy(actor)
    return SharedLowerLayers(trunk_of(actor), trunk_of(frozen.actor), eval_mode=frozen.eval_mode)


def nudge(actor):
    """The policy leaves its reference."""
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))


def count_runs(both):
    """Counts the runs of each block, those of policy and reference together, by position."""
    runs, seen = Counter(), set()
    for trunk in (both.policy, both.reference):
        for index, block in enumerate(transformer_blocks(trunk)):
            if block not in seen:
                block.register_forward_hook(lambda *_, index=index: runs.update([index]))
                seen.add(block)
    return runs


def compare(both, batch, groups=1):
    """The states equal those of two passes, and the shared blocks ran once."""
    tokens, mask = batch["tokens"], batch["attention_mask"]
    with torch.no_grad():
        expected = both.policy(tokens, mask), both.reference(tokens, mask)
    runs = count_runs(both)
    found = both.states(tokens, mask)
    assert [runs[index] for index in range(LAYERS)] == [
        groups * (1 if index < both.depth else 2) for index in range(LAYERS)
    ]
    for mine, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top", [1, 3, 4])
def test_shared_blocks_run_once_and_nothing_changes(kind, top):
    actor = actor_of(kind, top)
    both = both_of(actor)
    nudge(actor)
    assert both.depth == LAYERS - top
    mine, its = compare(both, rows())
    assert (mine - its).abs().max() > 0.01
    assert mine.requires_grad
    assert not its.requires_grad


def test_the_gradient_of_the_policy_is_that_of_its_own_pass():
    actor, batch = actor_of("qwen2", 2), rows()
    both = both_of(actor)
    nudge(actor)
    trains = [p for p in actor.parameters() if p.requires_grad]
    trunk = [p for p in both.policy.parameters() if p.requires_grad]
    real = batch["attention_mask"]
    wanted = torch.autograd.grad(both.policy(batch["tokens"])[real].square().sum(), trunk)
    both.policy.train().gradient_checkpointing()
    for found in (both.states(batch["tokens"])[0], both.states(batch["tokens"], real)[0]):
        for gradient, expected in zip(torch.autograd.grad(found[real].square().sum(), trunk), wanted, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for p in trains)


@pytest.mark.parametrize("share", [True, False])
def test_with_dropout_below_the_reference_runs_by_itself(share):
    config = {"vocab_size": 13, "layers": LAYERS, "width": 16, "heads": 2, "max_length": 20}
    for kind, rate in (("gpt2", "attn_pdrop"), ("gpt2", "embd_pdrop"), ("llama", "attention_dropout")):
        actor, batch = actor_of(kind, 1, lm=causal_lm(kind, **config, **{rate: 0.5})), rows()
        both = both_of(actor)
        actor.train(share)
        with torch.no_grad():
            expected = both.reference(batch["tokens"])
        runs = count_runs(both)
        mine, its = both.states(batch["tokens"])
        assert torch.equal(its, expected)
        assert runs[0] == (2 if share else 1)
        assert torch.equal(mine, its) != share
