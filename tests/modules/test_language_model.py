"""Models from scratch and from folders; damaged ones end in an error of one line that names the file."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from tests.modules.toys import KINDS, TOKENIZER, heads, rows, tiny_lm
from torchrl_lang._files import FileError
from torchrl_lang.modules import causal_lm, language_actor, load_causal_lm, load_language_model, save_language_model
from torchrl_lang.modules.actor import linear_layer, split_actor
from torchrl_lang.modules.fast_linear import FastLinear
from torchrl_lang.modules.language_model import fit_vocabulary

FILES = ["checksums.json", "config.json", "generation_config.json", "heads.safetensors", "model.safetensors"]
FILES += ["tokenizer.json", "tokenizer_config.json", "torchrl_lang.json"]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    q, v = heads()
    folder = tmp_path_factory.mktemp("intact") / "model"
    return save_language_model(folder, tiny_lm(), {"qvalue": q, "value": v}, tokenizer=TOKENIZER.config())


@pytest.fixture
def model(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "model")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A model that transformers saved, without checksums."""
    folder = tmp_path_factory.mktemp("foreign")
    for kind in KINDS:
        tiny_lm(kind).save_pretrained(folder / kind)
    return folder


def refused(folder, load=load_language_model):
    with pytest.raises(FileError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" + path.read_bytes()),
    "a list": lambda path: path.write_text("[]"),
    "deep": lambda path: path.write_text('{"a":' + "[" * 100_000),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_every_damage_to_every_file_is_refused(model, name, damage):
    DAMAGES[damage](model / name)
    assert name in refused(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_without_checksums_too(foreign, tmp_path, name, damage):
    folder = shutil.copytree(foreign / "llama", tmp_path / "model")
    DAMAGES[damage](folder / name)
    assert name in refused(folder) or "describes no model" in refused(folder)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


WRONG = {
    "lacks the weights .*{}": lambda weights, name: weights.pop(name),
    "holds the weights more, which are not part of": lambda weights, _: weights.update(more=torch.ones(2)),
    "not finite: {}": lambda weights, name: weights[name].view(-1)[:1].fill_(torch.nan),
    "holds {} as I32": lambda weights, name: weights.update({name: weights[name].view(torch.int32)}),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", False)])
def test_weights_of_another_model_are_refused(tmp_path, kind, tied, message):
    """Nothing that transformers would fill with random numbers, cast in silence, or leave out, is loaded."""
    lm = causal_lm(kind, vocab_size=12, layers=2, width=16, heads=2, max_length=40, tie_word_embeddings=tied)
    lm.save_pretrained(tmp_path)
    for name in sorted(load_file(tmp_path / "model.safetensors"))[::6]:
        weights = {name: parameter.clone() for name, parameter in load_file(tmp_path / "model.safetensors").items()}
        WRONG[message](weights, name)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert re.search(message.format(re.escape(name)), refused(tmp_path, load_causal_lm))
        lm.save_pretrained(tmp_path)


@pytest.mark.parametrize(("kind", "layers"), [("gpt2", "n_layer"), ("llama", "num_hidden_layers")])
def test_weights_of_other_sizes_are_refused(foreign, tmp_path, kind, layers):
    for number, changes in enumerate(({layers: 1}, {layers: 3}, {"vocab_size": 11}, {layers: 0}, {layers: -1})):
        folder = shutil.copytree(foreign / kind, tmp_path / str(number))
        edit(folder / "config.json", **changes)
        message = refused(folder, load_causal_lm)
        assert any(word in message for word in ("lacks", "not part of", "other shapes", "no model", "whole"))


def test_models_as_the_hub_has_them(tmp_path):
    """GPT-2's own file: names without a prefix, and buffers that newer versions do not have."""
    lm, path = tiny_lm(), tmp_path / "model.safetensors"
    lm.save_pretrained(tmp_path)
    weights = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
    weights |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40).tril() for layer in range(2)}
    save_file(weights, path, metadata={"format": "pt"})
    torch.testing.assert_close(load_causal_lm(tmp_path)(rows()["tokens"]).logits, lm(rows()["tokens"]).logits)
    save_file(weights | {"wte.weight": weights["wte.weight"].view(torch.int32)}, path, metadata={"format": "pt"})
    assert "holds wte.weight as I32" in refused(tmp_path, load_causal_lm)


@pytest.mark.parametrize("kind", [*KINDS, "gpt_bigcode", "opt"])
def test_models_from_scratch_have_the_size_asked_for_and_no_dropout(kind):
    lm = causal_lm(kind, vocab_size=11, layers=3, width=8, heads=2, max_length=16, pad=7)
    config = lm.config
    assert lm.get_input_embeddings().weight.shape == (11, 8)
    assert (config.num_hidden_layers, config.max_position_embeddings, config.pad_token_id) == (3, 16, 7)
    tokens = torch.arange(11)[None]
    assert torch.equal(lm.train()(tokens).logits, lm(tokens).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_local_folder_loads_and_grows_to_the_tokenizer(kind, tmp_path):
    lm = tiny_lm(kind, vocab_size=9)
    lm.save_pretrained(tmp_path)
    same = load_causal_lm(tmp_path)
    tokens = torch.randint(9, (2, 6))
    torch.testing.assert_close(same(tokens).logits, lm(tokens).logits)
    grown = load_causal_lm(tmp_path, TOKENIZER)
    assert grown.get_input_embeddings().weight.shape[0] == TOKENIZER.vocab_size == 12
    assert grown.config.vocab_size == 12
    logits = grown(tokens).logits
    assert logits.shape[-1] == 12
    torch.testing.assert_close(logits[..., :9], lm(tokens).logits)


def test_linear_layers_are_fast_ones_with_the_same_outputs(tmp_path):
    options = {"vocab_size": 300, "layers": 2, "width": 256, "heads": 2, "max_length": 16, "num_key_value_heads": 1}
    built = causal_lm("llama", **options)
    built.save_pretrained(tmp_path)
    loaded, theirs = load_causal_lm(tmp_path), LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(12).view(2, 6)
    for model in (built, loaded, copy.deepcopy(loaded)):
        block = model.model.layers[0]
        assert {type(layer) for layer in (block.mlp.up_proj, block.self_attn.q_proj, model.lm_head)} == {FastLinear}
        torch.testing.assert_close(model(tokens).logits, theirs(tokens).logits)
    assert linear_layer(split_actor(language_actor(loaded)).head) is loaded.lm_head
    assert type(fit_vocabulary(loaded, 301).lm_head) is FastLinear


def test_a_missing_model_is_named_and_quantized_weights_need_their_package_and_a_gpu(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="no-such-folder"):
        load_causal_lm("./no-such-folder", local_files_only=True)
    with pytest.raises(ValueError, match="quantize must be one of"):
        load_causal_lm(tmp_path, quantize="2bit")
    monkeypatch.setattr("torchrl_lang.modules.language_model.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-lang\[bitsandbytes\]'"):
        load_causal_lm(tmp_path, quantize="4bit")
    monkeypatch.setattr("torchrl_lang.modules.language_model.find_spec", lambda name: name)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="quantize='8bit' needs CUDA"):
            load_causal_lm(tmp_path, quantize="8bit")
