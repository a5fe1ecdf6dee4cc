"""A model that sees later tokens is refused wherever a model comes in."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from tests.modules.toys import KINDS, SLIDING, sliding_lm, tiny_lm
from torchrl_lang.modules import Trunk, causal_lm, language_actor
from torchrl_lang.modules.hugging_face import _checked, check_causal

SHAPE = {"vocab_size": 12, "layers": 1, "width": 16, "heads": 2, "max_length": 20}


def seeing(kind="bert", **options):
    """A model that sees the future, made past our own function."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model(kind, vocab_size=12, **sizes, **options)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"), [("bert", {}), ("electra", {"embedding_size": 16}), ("megatron-bert", {})], ids=str
)
def test_models_that_see_the_future_are_refused(kind, options, dtype):
    with pytest.raises(ValueError, match=r"is not causal: .*'gpt2', 'llama'"):
        causal_lm(kind, **SHAPE, **options)
    for make in (language_actor, Trunk):
        with pytest.raises(ValueError, match="is not causal"):
            make(seeing(kind, **options).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_behaviour_that_counts(kind):
    """A decoder whose layers look ahead is refused, an encoder that is told not to is taken."""
    Trunk(causal_lm("bert", is_decoder=True, **SHAPE))
    lm = copy.deepcopy(tiny_lm(kind))
    layers = lm.base_model.h if kind == "gpt2" else lm.base_model.layers
    layers[0].register_forward_hook(lambda module, args, out: out.flip(1))
    with pytest.raises(ValueError, match="is not causal"):
        Trunk(lm)


@pytest.mark.parametrize("kind", [*KINDS, *SLIDING, "bloom", "mixtral", "mamba"])
def test_causal_models_are_taken_and_left_as_they_were(kind):
    lm = sliding_lm(kind) if kind in SLIDING else causal_lm(kind, **SHAPE)
    lm.train()
    _checked.discard(lm.base_model)
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    assert check_causal(lm)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == grad
    assert all(module.training for module in lm.modules())


def test_a_model_is_run_once():
    lm, calls = tiny_lm(), []
    lm.base_model.register_forward_hook(lambda *_: calls.append(1))
    language_actor(lm), Trunk(lm)
    assert not calls  # causal_lm has run it
    Trunk(twin := copy.deepcopy(lm))
    assert len(calls) == 1
    Trunk(twin)
    assert len(calls) == 1


def test_on_the_meta_device_the_first_pass_checks():
    with torch.device("meta"):
        good, bad = causal_lm("llama", **SHAPE), seeing()
    rows = TensorDict(tokens=torch.zeros(2, 5, dtype=torch.int64), attention_mask=torch.ones(2, 5, dtype=torch.bool))
    for lm, error in ((good, None), (bad, "is not causal")):
        actor = language_actor(lm)
        lm.to_empty(device="cpu").apply(lm._init_weights)
        if error is None:
            actor[0](rows.copy())
            assert actor[0].module._is_checked
            continue
        with pytest.raises(ValueError, match=error):
            actor[0](rows.copy())
