"""Hugging Face models: causality, and adapters that are merged."""

from __future__ import annotations

import json
from copy import deepcopy

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GPT2LMHeadModel

from tests.modules.toys import CONTROL, WIDTH, games, rows, sliding_lm, tiny_lm
from torchrl_lang import modules
from torchrl_lang.modules.hugging_face import _checked, check_causal
from torchrl_lang.modules.save import language_model_of
from torchrl_lang.objectives import BCLoss

SHAPE = {"vocab_size": 12, "layers": 1, "width": 16, "heads": 2, "max_length": 20}


@pytest.mark.parametrize(("kind", "dtype"), [("bert", torch.bfloat16), ("megatron-bert", torch.float32)], ids=str)
def test_models_that_see_the_future_are_refused(kind, dtype):
    with pytest.raises(ValueError, match=r"is not causal: .*'gpt2', 'llama'"):
        modules.causal_lm(kind, **SHAPE)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    for make in (modules.language_actor, modules.Trunk):
        lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=12, **sizes))  # past our function
        with pytest.raises(ValueError, match="is not causal"):
            make(lm.to(dtype))


def test_it_is_the_behaviour_that_counts():
    """A decoder whose layers look ahead is refused, an encoder that is told not to is taken."""
    modules.Trunk(modules.causal_lm("bert", is_decoder=True, **SHAPE))
    lm = deepcopy(tiny_lm())  # a copy was not checked before
    lm.base_model.h[0].register_forward_hook(lambda module, args, out: out.flip(1))
    with pytest.raises(ValueError, match="is not causal"):
        modules.Trunk(lm)


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "bloom", "mixtral", "mamba"])
def test_causal_models_are_taken_and_left_as_they_were(kind):
    lm = sliding_lm(kind) if kind == "mistral" else modules.causal_lm(kind, **SHAPE)
    lm.train()
    _checked.discard(lm.base_model)
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    check_causal(lm)
    assert lm.base_model in _checked
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled() == grad
    assert all(module.training for module in lm.modules())


TOKENS = rows()["tokens"]
SIZES = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
PICTURES = {**SIZES, "image_size": 28, "patch_size": 14}
OTHERS = {
    "roberta": ({"is_decoder": True}, "Linear does not read the last states of RobertaModel"),
    "llama4_text": ({"num_local_experts": 2, "num_key_value_heads": 1}, "does not name its trunk"),
    "gemma3": ({"text_config": {**SIZES, "head_dim": 8}, "vision_config": PICTURES}, "reads more than text"),
    "xlnet": ({"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16}, "is not causal"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_other_parts_are_refused(kind):
    options, message = OTHERS[kind]
    shape = {} if {"text_config", "d_model"} & {*options} else SIZES
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **options))
    with pytest.raises(ValueError, match=message):
        modules.language_actor(lm)


class Doubled(GPT2LMHeadModel):
    """Does with its logits what no configuration says."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out


def test_a_model_that_changes_its_logits_is_refused():
    with pytest.raises(ValueError, match="it changes the logits of its last layer"):
        modules.language_actor(Doubled(modules.causal_lm("gpt2", **SHAPE).config))


SCALED = {
    "gemma2": {"head_dim": 8, "num_key_value_heads": 1, "final_logit_softcapping": 0.1},
    "cohere": {"logit_scale": 3.0},
    "granite": {"num_key_value_heads": 1, "logits_scaling": 4.0},
    "recurrent_gemma": {"lru_width": 16, "logits_soft_cap": 0.1},
    "xlstm": {"hidden_size": 32, "num_heads": 2, "output_logit_soft_cap": 0.1},
}


@pytest.mark.parametrize("kind", SCALED)
def test_logits_that_a_model_scales_or_caps(kind):
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | SCALED[kind]))).eval()
    actor, batch = modules.language_actor(lm), games(3)
    again = modules.language_actor(language_model_of(actor))
    with torch.no_grad():
        expected = lm(input_ids=batch["tokens"], use_cache=False).logits
        for each in (actor, again):
            found, real = each.get_dist(batch).logits, batch["attention_mask"]
            torch.testing.assert_close(found[real], expected.log_softmax(-1)[real], rtol=1e-4, atol=1e-5)
    loss = BCLoss(actor, logits_chunk=3, actor_normalizer="action", transition_weight=0.0)(batch)["loss_actor"]
    mask, tokens = batch["agent_mask"][:, 1:], batch["tokens"][:, 1:, None]
    torch.testing.assert_close(loss, -expected.log_softmax(-1)[:, :-1].gather(-1, tokens)[..., 0][mask].mean())


def test_encoders_and_decoders_of_encoders_are_refused():
    config = AutoConfig.for_model("t5", vocab_size=12, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(ValueError, match="has an encoder"):
        modules.language_actor(AutoModelForSeq2SeqLM.from_config(config))
    sizes = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16, "vocab_size": 12}
    with pytest.raises(ValueError, match="BartForCausalLM does not name its embeddings"):
        modules.language_actor(AutoModelForCausalLM.from_config(AutoConfig.for_model("bart", **sizes)))


def test_states_may_be_narrower_than_the_blocks():
    sizes = {"vocab_size": 12, "hidden_size": 16, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", word_embed_proj_dim=8, **sizes)).eval()
    found, real = modules.language_actor(lm).get_dist(rows()).logits, rows()["attention_mask"]
    torch.testing.assert_close(found[real], lm(TOKENS).logits.log_softmax(-1)[real])
    assert modules.default_qvalue_head(lm)(torch.zeros(3, 8)).shape[-1] == 12


def test_alibi_decodes():
    """Falcon's reads a mask of whole rows, so each step reads the row again."""
    torch.manual_seed(0)
    actor = modules.language_actor(modules.causal_lm("falcon", alibi=True, **SHAPE | {"max_length": 40}).eval())
    policy = modules.UtteranceActor(actor, CONTROL, 3, method="greedy")
    longest = rows()[:1]
    first = actor.get_dist(longest).logits[0, longest["attention_mask"].sum() - 1]
    first[list(CONTROL.forbidden)] = -torch.inf
    assert policy(longest)["action"][0, 0] == first.argmax()


def lora(**options):
    return peft.LoraConfig(
        **{"r": 2, "lora_alpha": 8, "init_lora_weights": False, "target_modules": "all-linear"} | options
    )


CASES = {
    "gpt2": ("gpt2", lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True), {}),
    "dora": ("llama", lora(use_dora=True), {}),
    "head": ("qwen2", lora(target_modules=["q_proj", "lm_head"]), {}),
    "head trained whole": ("llama", lora(modules_to_save=["lm_head"]), {}),
    "tied head": ("llama", lora(target_modules=["lm_head"]), {"tie_word_embeddings": True}),
    "tied embedding": ("gpt2", lora(target_modules=["wte", "c_attn"], fan_in_fan_out=True), {}),
    "some tokens": ("llama", lora(target_modules=["q_proj"], trainable_token_indices=[1, 3]), {}),
    "ia3": ("llama", peft.IA3Config(init_ia3_weights=False, target_modules=["k_proj"], feedforward_modules=[]), {}),
}


def tuned_model(case):
    kind, config, options = CASES[case]
    torch.manual_seed(0)
    options = SHAPE | {"layers": 2, "max_length": 40, "initializer_range": 0.3} | options
    lm = modules.causal_lm(kind, **options)
    model = peft.get_peft_model(lm, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_computes_what_was_saved(tmp_path, case):
    model = tuned_model(case)
    with torch.no_grad():
        logits = model(TOKENS).logits
        with model.disable_adapter():
            assert (model(TOKENS).logits - logits).abs().max() > 0.05, "the adapters do nothing"
        before = {name: value.clone() for name, value in model.state_dict().items()}
        modules.save_language_model(tmp_path / "model", modules.language_actor(model) if "tied" in case else model)
        loaded = modules.load_language_model(tmp_path / "model").lm
        torch.testing.assert_close(loaded(TOKENS).logits, logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=0, atol=0)
    names = load_file(tmp_path / "model" / "model.safetensors")
    assert not [name for name in names if "lora" in name or "base_layer" in name or "modules_to_save" in name]
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def loaded_logits(folder, lm):
    return modules.load_language_model(modules.save_language_model(folder / "model", lm)).lm(TOKENS).logits


@torch.no_grad()
def test_what_is_switched_off_is_not_merged_and_what_is_merged_already_is(tmp_path):
    model = tuned_model("dora")
    with model.disable_adapter():
        torch.testing.assert_close(loaded_logits(tmp_path, model), model(TOKENS).logits, rtol=1e-3, atol=1e-3)
    model.add_adapter("other", lora(target_modules=["v_proj"]))
    model.set_adapter("other")
    logits = model(TOKENS).logits
    model.merge_adapter()
    torch.testing.assert_close(loaded_logits(tmp_path, model), logits, rtol=1e-3, atol=1e-3)
    lm = tiny_lm("llama")
    lm.add_adapter(lora())  # by transformers itself
    torch.testing.assert_close(loaded_logits(tmp_path, lm), lm(TOKENS).logits, rtol=1e-3, atol=1e-3)
    assert not (tmp_path / "model" / "adapter_config.json").exists()


def test_ties_end_where_an_adapter_changes_one_side(tmp_path):
    with pytest.warns(UserWarning, match="tie"):
        model = tuned_model("tied head")
    modules.save_language_model(tmp_path / "model", model)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is False
    assert model.get_base_model().config.tie_word_embeddings is True


def test_what_cannot_be_merged_is_refused(tmp_path):
    prompts = peft.get_peft_model(tiny_lm(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    model = tuned_model("head")
    head = modules.TiedQValueHead(WIDTH, model.get_base_model().get_output_embeddings())
    for lm, heads, message in ((prompts, {}, "Learnt prompts are not"), (model, {"q": head}, "adapters change it")):
        with pytest.raises(ValueError, match=message):
            modules.save_language_model(tmp_path / "model", lm, heads)
    assert not (tmp_path / "model").exists()
