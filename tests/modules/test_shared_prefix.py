"""Tokens that rows begin with in common are read once: the cut, and the same states, losses and gradients."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.modules.toys import CONTROL, KINDS, sliding_lm, tiny_lm, use_exact_norms
from torchrl_lang.modules import Trunk, UtteranceActor, language_actor, train_top_layers
from torchrl_lang.modules.frozen.lower_layers import transformer_blocks
from torchrl_lang.modules.row_groups import shared_prefix

LENGTH = torch.tensor([20, 9, 13, 5, 20, 17, 9, 10])
MASK = torch.arange(20) < LENGTH[:, None]
prefix_module = importlib.import_module("torchrl_lang.modules.row_groups")


@pytest.fixture
def tokens(monkeypatch):
    """Two groups of rows that begin with nine tokens, of which one row ends there; and a shorter row."""
    monkeypatch.setitem(prefix_module._CALL, "cpu", 2)
    tokens = torch.randint(6, (8, 20), generator=torch.Generator().manual_seed(1))
    tokens[:5, :9], tokens[5:, :9] = tokens[0, :9], tokens[5, :9]
    return tokens.masked_fill(~MASK, CONTROL.pad)


def passes(model):
    """The shapes ``(rows, tokens)`` that the lowest block reads from now on."""
    found = []
    block = transformer_blocks(model)[0]
    block.register_forward_pre_hook(lambda block, inputs: found.append(tuple(inputs[0].shape[:2])))
    return found


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_cut_saves_most(data):
    n, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 6))
    rows = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=n, max_size=n))
    )
    length = torch.tensor(data.draw(st.lists(st.integers(0, width), min_size=n, max_size=n)))
    best = 0
    for cut in range(1, width):
        different = len({tuple(row[:cut]) for row in rows.tolist()})
        best = max(best, int(length.clamp_max(cut).sum()) - different * cut)
    found = shared_prefix(rows, length, call=1)
    if best < max(1, 0.1 * int(length.sum())):
        assert found is None
        return
    assert int(length.clamp_max(found.width).sum()) - len(found.first) * found.width == best
    assert torch.equal(rows[found.first][found.group, : found.width], rows[:, : found.width])


@pytest.mark.parametrize("groups", [1, "auto", 3])
@pytest.mark.parametrize("kind", [*KINDS, "mistral", "olmo3"])
def test_states_and_gradients_are_those_without(kind, groups, tokens, monkeypatch):
    use_exact_norms(monkeypatch)
    lm, found = tiny_lm(kind) if kind in KINDS else sliding_lm(kind), []
    lm.double()
    weight = torch.arange(MASK.sum() * 16).reshape(-1, 16).sin()
    for share in (False, True):
        trunk = Trunk(lm, length_groups=groups, share_prefixes=share).train()
        read = passes(lm)
        states = trunk(tokens, MASK)[MASK]
        (states * weight).sum().backward()
        assert (read[0] == (3, 9) and all(width < 12 for _, width in read)) == share
        found.append([states.detach(), *(p.grad for p in trunk.parameters() if p.grad is not None)])
        lm.zero_grad()
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
@pytest.mark.parametrize("cached", [True, False])
def test_replies_are_those_without(kind, cached, tokens):
    """Also of rows that begin while others go on."""
    lm = sliding_lm(kind, max_length=60) if kind == "mistral" else tiny_lm(kind, max_length=60)
    replies = []
    for share in (False, True):
        trunk = Trunk(lm.eval(), share_prefixes=share)
        actor = UtteranceActor(language_actor(trunk, head=lm.get_output_embeddings()), CONTROL, 6, seed=0)
        found = []
        for change in (slice(0), slice(1, 7)):
            rows, mask = nn.functional.pad(tokens, (0, 20)), nn.functional.pad(MASK, (0, 20))
            known = torch.cat([rows[:, :20], rows[:, 20:]], 1)
            known[change, :9] = tokens[6, :9].flip(0)
            found.append(
                actor.decoder.generate(known, mask, prefix_cache=actor._prefix_cache if cached else None).action
            )
        replies.append(found)
    for plain, other in zip(*replies, strict=True):
        assert torch.equal(other, plain)


def test_where_it_does_not_apply(tokens):
    lm = tiny_lm("gpt2", layers=1)
    read = passes(lm)

    def shares(trunk, read=read):
        read.clear()
        trunk(tokens, MASK)
        return (3, 9) in read

    assert shares(Trunk(lm))
    assert not shares(Trunk(lm, share_prefixes=False))
    assert not shares(Trunk(lm).gradient_checkpointing().train())
    assert shares(Trunk(lm).gradient_checkpointing(False).train())
    lm.transformer.drop.p = 0.1
    assert not shares(Trunk(lm).train())
    assert shares(Trunk(lm).eval())
    lm = tiny_lm("gpt2", layers=1)
    trunk = Trunk(lm).gradient_checkpointing().eval()
    lm.train()
    assert not shares(trunk)
    trunk = Trunk(tiny_lm("gpt2", layers=1))
    weights = {name: weight.detach() for name, weight in trunk.named_parameters()}
    square = lambda weights: torch.func.functional_call(trunk, weights, (tokens, MASK))[MASK].square().sum()  # noqa: E731
    found = torch.func.grad(square)(weights)["model.ln_f.weight"]
    trunk(tokens, MASK)[MASK].square().sum().backward()
    torch.testing.assert_close(found, trunk.model.ln_f.weight.grad, rtol=1e-4, atol=1e-4)
    long = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8, "factor": 5.0}
    lm = tiny_lm("llama", layers=1, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **long})
    read = passes(lm)
    assert not shares(Trunk(lm), read=read)
    lm = tiny_lm("gpt2", layers=1)
    states = torch.vmap(lambda part: Trunk(lm.eval())(part), randomness="same")(tokens.reshape(2, 4, 20))
    torch.testing.assert_close(states.reshape(8, 20, -1)[MASK], Trunk(lm, share_prefixes=False)(tokens)[MASK])
    prefix_module._CALL["cpu"] = 128
    assert not shares(Trunk(lm))  # these rows are too few


def test_with_states_of_frozen_layers(tokens):
    lm = tiny_lm("llama", layers=2)
    trunk = Trunk(lm)
    train_top_layers(trunk, 1)
    frozen, plain = trunk.frozen_states(tokens, MASK), Trunk(lm, share_prefixes=False)(tokens, MASK)
    torch.testing.assert_close(trunk(tokens, MASK, frozen=frozen)[MASK], plain[MASK], rtol=1e-4, atol=1e-5)
