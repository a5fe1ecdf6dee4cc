"""GGUF files beside what made them: the same weights, tokens and chat template, converted once."""

import json
import os

import numpy as np
import pytest
import torch

from tests.data.chat_templates import EXACT, tokenizer_of
from torchrl_lang._files import FileError
from torchrl_lang.modules import causal_lm, load_causal_lm
from torchrl_lang.text import ChatTokenizer, HFTokenizer, RowFormat
from torchrl_lang.text.gguf_files import without_gguf

NAMES = {"self_attn.": "attn_", "mlp.": "ffn_", "_proj": "", "attn_o.": "attn_output.", "layers": "blk", "model.": ""}
NAMES |= {"embed_tokens": "token_embd", "lm_head": "output", "input_layernorm": "attn_norm"}
NAMES |= {"post_attention_layernorm": "ffn_norm"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A llama and a tokenizer, and the path of a GGUF file of both."""
    gguf = pytest.importorskip("gguf")
    tokenizer, path = tokenizer_of(EXACT["chatml"]), tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    vocabulary, merges = tokenizer.get_vocab(), json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    lm = causal_lm("llama", vocab_size=len(vocabulary), layers=1, width=16, heads=2, max_length=32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(32)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(lm.config.rms_norm_eps)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    added = tokenizer.added_tokens_decoder
    kinds = {index: 3 if token.special else 4 for index, token in added.items()}  # CONTROL, USER_DEFINED
    writer.add_token_types([kinds.get(index, 1) for index in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, weight in lm.state_dict().items():
        values = weight.numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, transformers the two halves of a head
            values = np.ascontiguousarray(values.reshape(2, 2, 4, 16).swapaxes(1, 2).reshape(16, 16))
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor("output_norm.weight" if name == "norm.weight" else name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return lm, tokenizer, path


def test_a_gguf_file_is_the_model_that_it_was_made_of(made):
    lm, _, path = made
    loaded = load_causal_lm(path)
    tokens = torch.arange(12)[None]
    torch.testing.assert_close(loaded(tokens).logits, lm(tokens).logits)
    assert (path.with_suffix("") / "model.safetensors").exists()


def test_its_tokenizer_has_the_same_ids_and_template(made):
    _, source, path = made
    text = "Hello there, 12 <|im_end|>"
    assert HFTokenizer(path).encode(text) == HFTokenizer(source).encode(text)
    one, other = (ChatTokenizer(each, RowFormat.from_chat_template(each)) for each in (path, source))
    assert one.encode_opening(text) == other.encode_opening(text)
    assert one.control.end_of_action == other.control.end_of_action


def test_it_is_converted_once_and_again_where_it_is_newer(made):
    path = made[2]
    config = without_gguf(path) / "config.json"
    written = config.stat().st_mtime_ns
    assert without_gguf(str(path)) == path.with_suffix("")
    assert config.stat().st_mtime_ns == written
    os.utime(path, ns=(written + 10**9, written + 10**9))
    assert (without_gguf(path) / "config.json").stat().st_mtime_ns != written


def test_a_missing_or_damaged_file_is_named(tmp_path):
    pytest.importorskip("gguf")
    with pytest.raises(FileNotFoundError, match=r"There is no GGUF file .*none\.gguf"):
        load_causal_lm(tmp_path / "none.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(FileError, match=r"bad\.gguf cannot be read as GGUF"):
        load_causal_lm(tmp_path / "bad.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]
