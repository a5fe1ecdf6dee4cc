from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.modules.toys import KINDS, TOKENIZER, tiny_lm
from torchrl_lang.modules import causal_lm, fit_vocabulary, load_causal_lm


@pytest.mark.parametrize("kind", KINDS)
def test_models_from_scratch_have_the_size_asked_for_and_no_dropout(kind):
    lm = causal_lm(kind, vocab_size=11, layers=3, width=8, heads=2, max_length=16, pad=7)
    assert lm.get_input_embeddings().weight.shape == (11, 8)
    assert lm.config.num_hidden_layers == 3
    assert lm.config.max_position_embeddings == 16
    assert lm.config.pad_token_id == 7
    assert all(module.p == 0 for module in lm.modules() if isinstance(module, nn.Dropout))
    tokens = torch.randint(11, (2, 5))
    torch.testing.assert_close(lm.train()(tokens).logits, lm.eval()(tokens).logits)


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


def test_tied_embeddings_stay_tied_when_they_grow():
    lm = fit_vocabulary(tiny_lm("gpt2", vocab_size=9), 12)
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


def test_a_missing_model_is_named():
    with pytest.raises(OSError, match="no-such-folder"):
        load_causal_lm("./no-such-folder", local_files_only=True)


def test_quantized_weights_need_their_package_and_a_gpu(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="quantize='2bit' is unknown"):
        load_causal_lm(tmp_path, quantize="2bit")
    monkeypatch.setattr("torchrl_lang.modules.language_model.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-lang\[bitsandbytes\]'"):
        load_causal_lm(tmp_path, quantize="4bit")
    monkeypatch.setattr("torchrl_lang.modules.language_model.find_spec", lambda name: name)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="quantize='8bit' needs CUDA"):
            load_causal_lm(tmp_path, quantize="8bit")
