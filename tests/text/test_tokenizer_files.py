"""Saved tokenizers, read by transformers alone: the same ids as ours, and the same texts."""

from __future__ import annotations

import json
import string
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.rows import UNUSUAL
from tests.text.test_hf_tokenizer import byte_level, word_level
from torchrl_lang.modules import causal_lm
from torchrl_lang.text import CharTokenizer, HFTokenizer
from torchrl_lang.text.tokenizer_files import tokenizer_from_config, transformers_tokenizer, write_tokenizer
from torchrl_lang.text.tokenizers import UNKNOWN, fingerprint

NAMES = list(CharTokenizer.DEFAULT_CONTROL.values())
ODD = CharTokenizer(
    # Symbols that begin alike, that a pattern must escape, and control tokens that do not stand last.
    ["a", "b", "ab", "ba", "abc", *NAMES[:3], " ", "\n", "<", "/", ">", "s", "^", "$", "[", "]", "(", "|", "\\", "-"]
    + ["日本", "é", "<g>", ".*", *NAMES[3:], "z"]
)
ONE = dict(zip(CharTokenizer.DEFAULT_CONTROL, "_12345", strict=True))
SINGLE = CharTokenizer([*"ab_12345"], ONE)
UNICODE = CharTokenizer(["a", "é", "ab", "\n", UNKNOWN, *"_12345"], ONE, unknown=True)
WORDLE = CharTokenizer([*string.ascii_lowercase, "<g>", "<b>", "<y>", *NAMES])


def ours(tokenizer, text):
    try:
        return tokenizer.encode(text)
    except ValueError:
        return None


def theirs(tokenizer, text):
    try:
        return tokenizer(text)["input_ids"]
    except Exception as error:  # what the tokenizers library raises is a plain Exception
        if "UNK" not in str(error):
            raise
        return None


BYTES = HFTokenizer(byte_level(eos_token="<|end|>", pad_token="<|fill|>"))
KINDS = {"odd": ODD, "single": SINGLE, "wordle": WORDLE, "unicode": UNICODE, "bytes": BYTES}
KINDS["words"] = HFTokenizer(word_level(), control={"end_of_action": "<|end_of_action|>"})


def texts(tokenizer):
    pieces = [*NAMES, "<|end|>", "is it ", "red", *getattr(tokenizer, "symbols", [])]
    pieces += ["\r\n", "\r", "e\N{COMBINING ACUTE ACCENT}"]
    return st.lists(st.one_of(st.sampled_from(pieces), st.text(UNUSUAL, max_size=3))).map("".join)


@pytest.mark.parametrize("name", KINDS)
def test_it_gives_the_same_ids(name):
    tokenizer = KINDS[name]
    written = transformers_tokenizer(tokenizer)

    @settings(deadline=None, max_examples=25)
    @given(text=texts(tokenizer))
    def check(text):
        ids = ours(tokenizer, text)
        assert theirs(written, text) == ids
        if ids is not None:
            assert written.decode(ids) == tokenizer.decode(ids)

    check()
    again = tokenizer_from_config(MappingProxyType(json.loads(json.dumps(tokenizer.config()))))
    assert (type(again), again.control) == (type(tokenizer), tokenizer.control)
    assert [other for other, kind in KINDS.items() if fingerprint(kind) == fingerprint(again)] == [name]
    if isinstance(tokenizer, CharTokenizer):
        assert written.convert_ids_to_tokens(range(tokenizer.vocab_size)) == list(tokenizer.symbols)
    assert written.decode(range(tokenizer.vocab_size)) == tokenizer.decode(range(tokenizer.vocab_size))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi3"])
@pytest.mark.parametrize("tokenizer", [ODD, BYTES], ids=["char", "bytes"])
def test_auto_tokenizer_reads_it_beside_every_model(tmp_path, kind, tokenizer):
    """For a few types AutoTokenizer takes a class of its own, which would read other ids in silence."""
    causal_lm(kind, vocab_size=11, layers=1, width=8, heads=2, max_length=16).save_pretrained(tmp_path)
    write_tokenizer(tokenizer.config(), tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    text = "a/b-[ab]abc(日本</a>" if tokenizer is ODD else "is it </a> blue?"
    assert read(text)["input_ids"] == tokenizer.encode(text)
    assert read.decode(tokenizer.encode(text)) == text
    assert len(read) == tokenizer.vocab_size
    ends = json.loads((tmp_path / "generation_config.json").read_text())
    assert (ends["pad_token_id"], ends["eos_token_id"]) == (tokenizer.control.pad, tokenizer.control.end_of_action)
    again = HFTokenizer(tmp_path)
    assert again.control == tokenizer.control
    assert again.encode(text) == tokenizer.encode(text)


def test_a_tokenizer_of_the_users_own_is_left_out_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="kind 'morse' cannot be converted to transformers"):
        write_tokenizer({"kind": "morse"}, tmp_path)
    assert not list(tmp_path.iterdir())
