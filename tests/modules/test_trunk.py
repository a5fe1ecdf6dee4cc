"""The trunk: the states that the language model reads, in groups, compiled and recomputed."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Model

from tests.modules.toys import CONTROL, KINDS, WIDTH, rows, tiny_lm, without_blocks
from torchrl_lang.modules import Trunk, causal_lm
from torchrl_lang.modules.length_groups import length_groups
from torchrl_lang.modules.trunk import trunk_module

groups_module = importlib.import_module("torchrl_lang.modules.length_groups")


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_what_the_language_model_reads(kind):
    lm, batch = tiny_lm(kind), rows()
    with torch.no_grad():
        hidden = Trunk(lm)(batch["tokens"], batch["attention_mask"])
        expected = lm(batch["tokens"], attention_mask=batch["attention_mask"].long()).logits
    real = batch["attention_mask"]
    torch.testing.assert_close(lm.get_output_embeddings()(hidden)[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_pre_norm_is_the_input_of_the_final_norm(kind):
    lm, batch = tiny_lm(kind), rows()
    hidden, pre_norm = Trunk(lm, expose_pre_norm=True)(batch["tokens"], batch["attention_mask"])
    norm = lm.base_model.ln_f if kind == "gpt2" else lm.base_model.norm
    torch.testing.assert_close(norm(pre_norm), hidden)
    assert not torch.allclose(pre_norm, hidden)
    out = trunk_module(Trunk(lm, expose_pre_norm=True))(batch.clone())
    torch.testing.assert_close(out["hidden_pre_norm"], pre_norm)


def test_any_batch_shape_and_int32_tokens():
    trunk, batch = Trunk(tiny_lm()), rows(n=6)
    flat = trunk(batch["tokens"])
    shaped = trunk(batch["tokens"].reshape(2, 3, -1).int())
    assert shaped.shape == (2, 3, 20, WIDTH)
    torch.testing.assert_close(shaped.reshape(6, 20, WIDTH), flat)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(kind):
    batch, gradients, calls = rows(), [], []
    for checkpointed in (False, True):
        trunk = Trunk(tiny_lm(kind)).train().gradient_checkpointing(checkpointed)
        layer = (trunk.model.h if kind == "gpt2" else trunk.model.layers)[0].mlp
        count = []
        layer.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        trunk(batch["tokens"]).square().sum().backward()
        gradients.append([p.grad for p in trunk.parameters()])
        calls.append(len(count))
    assert calls == [1, 2]
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_a_copy_is_independent():
    trunk, tokens = Trunk(tiny_lm(), expose_pre_norm=True), rows()["tokens"]
    twin = copy.deepcopy(trunk)
    before = [state.clone() for state in twin(tokens)]
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.zero_()
    torch.testing.assert_close(list(twin(tokens)), before)


def test_errors_name_the_remedy():
    with pytest.raises(ValueError, match="41 tokens exceed the model's 40 positions"):
        Trunk(tiny_lm(max_length=40))(torch.zeros(1, 41, dtype=torch.int64))
    lm = causal_lm("opt", vocab_size=9, layers=1, width=8, heads=2, max_length=16, pad=CONTROL.pad)
    hidden, pre_norm = Trunk(lm, expose_pre_norm=True)(torch.ones(1, 5).long())
    norm = lm.base_model.decoder.final_layer_norm
    torch.testing.assert_close(norm(pre_norm), hidden)
    lm.base_model.decoder.final_layer_norm = None
    with pytest.raises(ValueError, match="OPTModel has no final norm to expose"):
        Trunk(lm, expose_pre_norm=True)


def test_which_models_can_be_read_piece_by_piece():
    assert all(Trunk(tiny_lm(kind)).cache_obstacle is None for kind in KINDS)
    small = {"vocab_size": 9, "layers": 1, "width": 8, "heads": 2, "max_length": 16}
    assert Trunk(causal_lm("mistral", sliding_window=4, **small)).cache_obstacle is None
    obstacles = {
        "bloom": "it takes no position_ids",
        "gpt_neo": "its local attention builds masks of its own",
        "qwen3_next": r"its layers are of the kinds \['linear_attention'\]",
    }
    config = {"gpt_neo": {"attention_types": [[["local"], 1]]}, "qwen3_next": {"layer_types": ["linear_attention"]}}
    for kind, obstacle in obstacles.items():
        trunk = Trunk(causal_lm(kind, **small, **config.get(kind, {})))
        assert trunk.cache_obstacle is not None
        assert re.search(obstacle, trunk.cache_obstacle)
    trunk = Trunk(tiny_lm("llama"))
    trunk.model.config._attn_implementation = "flash_attention_2"
    assert "attn_implementation='sdpa'" in trunk.cache_obstacle


@pytest.mark.parametrize("groups", [3, "auto"])
def test_length_groups_change_no_state_and_no_gradient(groups, monkeypatch):
    monkeypatch.setitem(groups_module._CALL, "cpu", 4)  # or rows this small would all be run together
    lm = causal_lm(vocab_size=11, layers=2, width=16, heads=2, max_length=24)
    length = torch.tensor([[20, 3, 9], [14, 1, 20]])
    mask = torch.arange(20) < length[..., None]
    tokens = torch.randint(11, (2, 3, 20), generator=torch.Generator().manual_seed(0))
    outs, grads = [], []
    for trunk in (Trunk(lm, expose_pre_norm=True, length_groups=count) for count in (1, groups)):
        lm.zero_grad()
        states = trunk(tokens, mask)
        sum(state[mask].square().sum() for state in states).backward()
        outs.append([state.detach()[mask] for state in states])
        grads.append({name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None})
    for plain, grouped in zip(*outs, strict=True):
        torch.testing.assert_close(grouped, plain, rtol=1e-4, atol=1e-5)
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_trunk_gives_the_same_states_and_gradients():
    lm, batch, found = tiny_lm(layers=1), rows(), []
    for compiled in (False, True):
        trunk = Trunk(lm, expose_pre_norm=True)
        if compiled:
            trunk.compile(backend="eager", fullgraph=True)
        lm.zero_grad()
        states = trunk(batch["tokens"], batch["attention_mask"])
        sum(state[batch["attention_mask"]].square().sum() for state in states).backward()
        grads = [p.grad.clone() for p in trunk.parameters()]
        found.append([state.detach()[batch["attention_mask"]] for state in states] + grads)
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


@pytest.fixture
def no_blocks(monkeypatch):
    """Where it does not matter what is compiled: Dynamo traces the blocks of a model for seconds."""
    monkeypatch.setattr(GPT2Model, "forward", without_blocks)


@pytest.mark.slow
def test_copies_of_a_compiled_trunk_compile_anew(no_blocks):
    trunk, batch = Trunk(tiny_lm(layers=1)).compile(backend="eager"), rows()
    with torch.no_grad():
        before = trunk(batch["tokens"])
    other = pickle.loads(pickle.dumps(trunk))  # noqa: S301
    assert other.compiled
    assert not other._compiled
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        assert not torch.allclose(other(batch["tokens"]), before)
        torch.testing.assert_close(trunk(batch["tokens"]), before)


@pytest.mark.slow
def test_many_modes_do_not_crowd_each_other_out(no_blocks):
    """Dynamo compiles a function a few times only, here once, then never again."""
    frames = []

    def backend(graph, inputs):
        frames.append(1)
        return graph

    trunk, batch = Trunk(tiny_lm(layers=1), length_groups=1).compile(backend=backend), rows()
    modes = [(True, True, False), (False, True, False), (True, False, True)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for training, grad, autocast in modes:
            trunk.train(training)
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                trunk(batch["tokens"])
    assert len(frames) == 3


def best_cost(length, call):
    """By trying every way to cut the sorted rows."""
    ordered = sorted(max(n, 1) for n in length)
    found = []
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            ends = [0, *cuts, len(ordered)]
            found.append(sum((b - a) * ordered[b - 1] + call for a, b in pairwise(ends)))
    return min(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 60))
def test_no_split_costs_less(length, call):
    length = torch.tensor(length)
    groups = length_groups(length, call=call)
    assert sum(chosen.shape[0] * width + call for chosen, width in groups) == best_cost(length.tolist(), call)
    assert torch.cat([chosen for chosen, _ in groups]).sort().values.tolist() == list(range(length.shape[0]))
    assert all(width == max(int(length[chosen].max()), 1) for chosen, width in groups)


def test_many_different_lengths_are_rounded_but_nearly_nothing_is_lost():
    length = torch.arange(1, 1001)
    groups = length_groups(length, call=0)
    assert len(groups) == 48
    assert sum(chosen.shape[0] * width for chosen, width in groups) <= 1.03 * int(length.sum())
    assert length_groups(length[:0]) == []
