"""The quick way through GPT-2 gives what the model gives, and is taken for nothing else."""

from __future__ import annotations

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from torchrl_lang.functional import fast_linear
from torchrl_lang.modules import Trunk, causal_lm, fast_layers
from torchrl_lang.modules.decoding.cache import RowCache
from torchrl_lang.modules.decoding.gpt2_step import GPT2Step, fast_gelu

TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float64: {"atol": 1e-12, "rtol": 1e-12},
    torch.bfloat16: {"atol": 0.06, "rtol": 0.06},
}
N, T = 6, 24


def model_of(**config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        lm = causal_lm(vocab_size=12, layers=3, width=16, heads=2, max_length=T, **config).eval()
    with torch.no_grad():  # nothing is zero or one, so that nothing can be left out unnoticed
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    return lm


def both_ways(trunk, pieces, rows=None, held=N):
    """The same pieces, ``(tokens, positions, visible, last)``, by the step and by the model, with a cache each."""
    pieces = list(pieces)
    step, caches = GPT2Step(trunk), (RowCache(T, rows=held), RowCache(T, rows=held))
    assert step is not None
    with torch.no_grad():
        assert step.applies(pieces[0][0])
        for tokens, positions, visible, last in pieces:
            quick = step(caches[0], tokens, positions, visible, last, rows=rows)
            states = caches[1].extend(trunk, tokens, positions, visible, rows=rows)
            yield quick, states[torch.arange(len(tokens)), last]
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(layer.keys, other.keys, **TOLERANCE[layer.keys.dtype])
        torch.testing.assert_close(layer.values, other.values, **TOLERANCE[layer.keys.dtype])


def ragged(n=N):
    """A prompt, single tokens, a piece at other places of each row, and one more token."""
    generator = torch.Generator().manual_seed(2)
    length = torch.randint(1, 7, (n,), generator=generator)

    def piece(width, begin):
        return torch.randint(12, (n, width), generator=generator), begin[:, None] + torch.arange(width)

    yield piece(6, length)[0], None, None, length - 1
    for i in range(2):
        yield *piece(1, length + i), 9, torch.zeros_like(length)
    yield *piece(4, length + 2), T, torch.randint(4, (n,), generator=generator)
    yield *piece(1, length + 3), 11, torch.zeros_like(length)


CONFIGS = {
    "as built": {},
    "exact gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "dropout": {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40, "layer_norm_epsilon": 1e-2},
}


CASES = [*((config, torch.float32) for config in CONFIGS), *(("as built", dtype) for dtype in TOLERANCE)]


@pytest.mark.parametrize(("config", "dtype"), dict.fromkeys(CASES))
def test_it_computes_what_the_model_computes(config, dtype):
    for quick, states in both_ways(Trunk(model_of(**CONFIGS[config]).to(dtype)), ragged()):
        assert quick.dtype == dtype
        torch.testing.assert_close(quick, states, **TOLERANCE[dtype])


def test_fast_layers_compute_the_same(monkeypatch):
    plain, fast = model_of(), model_of()
    assert {type(part) for part in fast.modules() if isinstance(part, Conv1D)} == {fast_layers.FastConv1D}
    for part in plain.modules():
        if isinstance(part, Conv1D):
            part.__class__ = Conv1D
    assert GPT2Step.accepts(Trunk(fast))
    assert GPT2Step.accepts(Trunk(plain))
    monkeypatch.setattr(fast_linear, "_MANY_PRODUCTS", 1)
    computed = [list(both_ways(Trunk(model), ragged())) for model in (fast, plain)]
    torch.testing.assert_close(*computed, **TOLERANCE[torch.float32])


def test_chosen_rows_and_fewer_rows_than_are_kept():
    trunk = Trunk(model_of())
    for quick, states in both_ways(trunk, ragged(3), rows=torch.tensor([4, 0, 2])):
        torch.testing.assert_close(quick, states, **TOLERANCE[torch.float32])
    for quick, states in both_ways(trunk, ragged(2)):
        torch.testing.assert_close(quick, states, **TOLERANCE[torch.float32])


def hook(lm, name):
    lm.base_model.get_submodule(name).register_forward_hook(lambda module, args, out: out)


REFUSED = {
    "training": lambda lm: lm.train(),
    "a hook on a layer": lambda lm: hook(lm, "h.1"),
    "a hook on the model": lambda lm: hook(lm, ""),
    "a hook on an activation": lambda lm: hook(lm, "h.0.mlp.act"),
    "a hook before the final norm": lambda lm: lm.base_model.ln_f.register_forward_pre_hook(lambda *_: None),
    "a wrapped forward": lambda lm: setattr(lm.base_model.h[1].attn, "forward", lm.base_model.h[1].attn.forward),
    "a layer of another class": lambda lm: setattr(
        lm.base_model.h[2].mlp.c_fc, "__class__", type("Odd", (Conv1D,), {})
    ),
    "an unknown activation": lambda lm: setattr(lm.base_model.h[0].mlp, "act", nn.Tanh()),
    "a parametrization": lambda lm: parametrizations.weight_norm(lm.base_model.h[0].attn.c_attn),
    "eager attention": lambda lm: lm.set_attn_implementation("eager"),
    "embeddings with a greatest norm": lambda lm: setattr(lm.base_model.wte, "max_norm", 1.0),
    "a matrix of another dtype": lambda lm: lm.base_model.h[0].mlp.c_fc.double(),
    "LoRA": lambda lm: get_peft_model(lm, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)),
    "compiled by itself": lambda lm: lm.base_model.compile(backend="eager"),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_anything_else_is_left_to_the_model(change):
    lm = model_of()
    trunk = Trunk(lm)
    assert GPT2Step.accepts(trunk)
    change(lm)
    assert not GPT2Step.accepts(trunk)


def test_gradients_autocast_and_hooks_on_everything_are_the_models_too():
    step, several = GPT2Step(Trunk(model_of())), torch.zeros(2, 3, dtype=torch.int64)
    assert not step.applies(several)
    with torch.no_grad():
        assert step.applies(several)
        assert step.applies(several[:, :1])
        with torch.autocast("cpu", torch.bfloat16):
            assert not step.applies(several)
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
        assert not step.applies(several)
        handle.remove()
        compiled = GPT2Step(Trunk(model_of()).compile(backend="eager"))
        assert compiled.applies(several)
        assert not compiled.applies(several[:, :1])  # these run compiled
    with torch.inference_mode():
        assert step.applies(several)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu(dtype):
    x = torch.linspace(-30, 30, 4001, dtype=dtype).reshape(1, -1)
    expected = nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(fast_gelu(x.clone(), torch.empty_like(x)), expected, atol=1e-6, rtol=1e-5)


def test_kernels_that_others_put_in_its_place_are_used(monkeypatch):
    """By Hugging Face's registry of attention functions, or by a class's forward."""
    trunk = Trunk(model_of())
    for kind in (Conv1D, fast_layers.FastConv1D):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x: x @ self.weight + self.bias)
            assert not GPT2Step.accepts(trunk)
    with monkeypatch.context() as patch:  # with the name and the module of what it wraps
        patch.setattr(Conv1D, "forward", functools.wraps(Conv1D.forward)(lambda self, x: x * 0))
        assert not GPT2Step.accepts(trunk)
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *args, **kwargs: None)
        assert not GPT2Step.accepts(trunk)
    assert GPT2Step.accepts(trunk)
