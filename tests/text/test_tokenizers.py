from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import to_row
from torchrl_lang.text import CharTokenizer, Episode, Turn, from_row, word_tokenizer
from torchrl_lang.text.tokenizer_files import tokenizer_from_config
from torchrl_lang.text.tokenizers import UNKNOWN

WORDS = CharTokenizer.from_alphabet(["a", "b", "ab", "ba", " ", "<", "/", ">", "s"])


@given(st.text("ab </>s"))
def test_decoding_gives_the_text_again_and_never_a_control_token(text):
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text
    assert not set(ids) & set(WORDS.control.ids())


@pytest.mark.parametrize("build", [CharTokenizer.from_texts, word_tokenizer])
def test_an_alphabet_of_texts_reads_every_text(build):
    """Curly quotes, accents of both forms, emoji and line breaks of all systems."""
    tokenizer = build(["don\N{RIGHT SINGLE QUOTATION MARK}t cafe\N{COMBINING ACUTE ACCENT}\r\n", "\U0001f600\rso"])
    text = "so don\N{RIGHT SINGLE QUOTATION MARK}t caf\xe9\n\U0001f600\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text.replace("\xe9", "e\u0301").replace("\n", "\r\n")) == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode("so\u0416\ud800<s>"))[:4] == f"so{UNKNOWN}{UNKNOWN}"
    assert not {"\r", "\u0301", "\ud800"} & set(tokenizer.symbols)
    assert tokenizer.control.forbidden == (tokenizer.unknown,) == (tokenizer.symbols.index(UNKNOWN),)
    again = tokenizer_from_config(json.loads(json.dumps(tokenizer.config())))
    assert again.encode("s\u0416") == tokenizer.encode("s\u0416")


def test_the_agent_does_not_write_the_unknown_symbol():
    tokenizer = CharTokenizer.from_texts(["cafe\u0301"])
    with pytest.raises(ValueError, match="'\u0416' at position 4 of 'caf\xe9\u0416' is not in this"):
        tokenizer.encode_action("cafe\u0301\u0416")
    read = Episode([Turn("c\u0416"), Turn("fa", 1.0)], terminated=True)
    row = to_row(read, tokenizer, 10)
    assert [turn.text for turn in from_row(row, tokenizer).turns] == [f"c{UNKNOWN}", "fa"]
    with pytest.raises(ValueError, match="is not in this tokenizer's alphabet"):
        to_row(Episode([Turn("c"), Turn("\u0416", 1.0)], terminated=True), tokenizer, 10)
    played = Episode([Turn(UNKNOWN, 1.0, tokens=(tokenizer.unknown,))], terminated=True)  # what any policy may do
    assert from_row(to_row(played, tokenizer, 10), tokenizer) == played


def test_the_alphabet_of_plain_words_has_no_unknown_symbol():
    """So models and runs of the versions before keep their vocabularies."""
    plain = word_tokenizer(["it is red\n"])
    words = (" is", " red", "it")
    assert plain.symbols == ("\n", *map(chr, range(32, 127)), *words, *CharTokenizer.DEFAULT_CONTROL.values())
    assert plain.unknown is None
    assert list(plain.config()) == ["kind", "symbols", "control"]
    assert word_tokenizer(["it"], unknown=True).encode("it\xe9") == [96, 97]
    assert set(plain.symbols) - set(word_tokenizer(["it is red", "he is"], min_count=2).symbols) == {"it", " red"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"symbols": ["a", 5]}, 'has 5 as "symbols.1", expected a valid string'),
        ({"control": {"pad": "<|pad|>"}}, "has the control tokens .*, got \\['pad'\\]"),
        ({"symbols": ["a", "b"]}, "are missing"),
        ({"symbols": [*WORDS.symbols, "a"]}, "some are empty or repeated"),
        ({"unknown": True}, "'�'. are missing"),
        ({"kind": ["char"]}, "kind of tokenizer \\['char'\\]"),
    ],
)
def test_a_damaged_configuration_is_an_error_in_one_line(changes, found):
    config = {**WORDS.config(), **changes}
    with pytest.raises(ValueError, match=found) as caught:
        tokenizer_from_config(config)
    assert "\n" not in str(caught.value)
