from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_lang.data import CharTokenizer, Tokenizer, fingerprint, tokenizer_from_config

WORDS = CharTokenizer.from_alphabet(["a", "b", "ab", "ba", " ", "<", "/", ">", "s"])


@given(st.text("ab </>s"))
def test_decoding_gives_the_text_again_and_never_a_control_token(text):
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text
    assert not set(ids) & set(WORDS.control.ids())


def test_names_of_control_tokens_in_a_text_are_text():
    ids = WORDS.encode("a</a>")
    assert ids == [WORDS.symbols.index(symbol) for symbol in ("a", "<", "/", "a", ">")]


def test_the_ids_of_wordle(wordle_symbols):
    control = wordle_symbols.control
    assert wordle_symbols.vocab_size == 35
    assert wordle_symbols.encode("az<g><b><y>") == [0, 25, 26, 27, 28]
    assert control.ids() == (29, 30, 31, 32, 33, 34)


@pytest.mark.parametrize("text", ["crane7", "Crane", "cra ne"])
def test_a_foreign_character_is_named(wordle_symbols, text):
    with pytest.raises(ValueError, match="is not in this tokenizer's alphabet"):
        wordle_symbols.encode(text)


def test_the_configuration_survives_json(wordle_symbols):
    again = tokenizer_from_config(json.loads(json.dumps(wordle_symbols.config())))
    assert isinstance(again, Tokenizer)
    assert again.encode("slate<b>") == wordle_symbols.encode("slate<b>")
    assert again.control == wordle_symbols.control
    assert fingerprint(again) == fingerprint(wordle_symbols) != fingerprint(WORDS)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind of tokenizer 'morse'"):
        tokenizer_from_config({"kind": "morse"})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"symbols": None}, 'has None as "symbols", expected list'),
        ({"symbols": ["a", 5]}, 'has 5 as "symbols.1", expected str'),
        ({"symbols": "abc"}, "has 'abc' as \"symbols\", expected list"),
        ({"control": []}, 'has \\[\\] as "control", expected dict'),
        ({"control": {"pad": "<|pad|>"}}, "has the control tokens .*, got \\['pad'\\]"),
        ({"symbols": ["a", "b"]}, "are not among the symbols"),
        ({"kind": "huggingface"}, 'has no field "tokenizer"'),
        ({"kind": "huggingface", "tokenizer": {}}, "not a tokenizer of the tokenizers library"),
        ({"kind": ["char"]}, "kind of tokenizer \\['char'\\]"),
    ],
)
def test_a_damaged_configuration_is_an_error_in_one_line(changes, found):
    config = {**WORDS.config(), **changes}
    with pytest.raises(ValueError, match=found) as caught:
        tokenizer_from_config(config)
    assert "\n" not in str(caught.value)
