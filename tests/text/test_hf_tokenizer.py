from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tests.rows import UNUSUAL, to_row
from torchrl_lang.text import CharTokenizer, Episode, HFTokenizer, Tokenizer, Turn, from_row
from torchrl_lang.text.hf_tokenizer import PlainTextEncoder


def byte_level(**special: str | AddedToken) -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(dict.fromkeys(special.values())),
        show_progress=False,
    )
    backend.train_from_iterator(["is it red? is it blue? yes it is. no it is not. </a> </s>"] * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", backend.token_to_id("<|end|>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture(scope="module")
def source():
    return byte_level(eos_token="<|end|>", pad_token="<|fill|>")


@pytest.fixture(scope="module")
def tokenizer(source):
    return HFTokenizer(source)


NAMES = [*CharTokenizer.DEFAULT_CONTROL.values(), "<|end|>", "<|fill|>"]


def test_control_tokens_stand_behind_the_vocabulary(source, tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == len(source) + 5  # the padding token is there already
    assert tokenizer.control.pad == source.pad_token_id
    assert sorted(tokenizer.control.ids())[1:] == list(range(len(source), len(source) + 5))
    assert "</a>" not in source.get_vocab(), "the tokenizer that came in was changed"


@settings(deadline=None, max_examples=25)
@given(parts=st.lists(st.one_of(st.sampled_from(NAMES), st.text(UNUSUAL, max_size=6)), max_size=5))
def test_decoding_gives_any_text_again(tokenizer, parts):
    """Names of special tokens are text, too."""
    special = {*tokenizer.control.ids(), tokenizer.backend.token_to_id("<|end|>")}
    text = "".join(["is it ", *NAMES, *parts]).encode("utf-8", "ignore").decode()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not special & set(ids)


def test_a_text_behind_others_keeps_its_white_space():
    blank = AddedToken("<|blank|>", rstrip=True, special=True)  # takes the white space after it
    backend = byte_level(mask_token=blank, eos_token="<|end|>").backend_tokenizer
    assert backend.decode(PlainTextEncoder(backend).following(" is it")) == " is it"


def word_level(**special: str) -> PreTrainedTokenizerFast:
    vocabulary = {"is": 0, "it": 1, "red": 2, "</a>": 3, "<unk>": 4}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def test_a_control_token_can_have_another_name():
    """It must where it is an ordinary word."""
    with pytest.raises(ValueError, match="'</a>' encodes to the control token </a>"):
        HFTokenizer(word_level())
    tokenizer = HFTokenizer(word_level(), control={"end_of_action": "<|end_of_action|>"})
    assert tokenizer.encode("is </a>") == [0, 3]
    assert tokenizer.control.end_of_action >= 5
    with pytest.raises(ValueError, match="has the control tokens"):
        HFTokenizer(word_level(), control={"end_of_acton": "</a>"})


def test_only_fast_tokenizers_and_whole_characters(tokenizer):
    with pytest.raises(ValueError, match="has no tokens for"):
        tokenizer.encode("a\ud800")
    with pytest.raises(TypeError, match="not a fast tokenizer"):
        HFTokenizer(CharTokenizer.from_alphabet("abc"))


def test_rows_keep_unusual_spellings(tokenizer):
    """A model may write a word in pieces that the tokenizer would not choose."""
    assert len(tokenizer.encode("is")) == 1
    pieces = tuple(tokenizer.encode(letter)[0] for letter in "is")
    episode = Episode([Turn("é?"), Turn("is", 1.0, tokens=pieces), Turn("is")], terminated=True)
    row = to_row(episode, tokenizer, 20)
    assert from_row(row, tokenizer) == episode
    half = tokenizer.encode("é")[:1]  # half a character
    cut = Episode([Turn(tokenizer.decode(half), 0.0, tokens=tuple(half))], terminated=False)
    assert from_row(to_row(cut, tokenizer, 20), tokenizer) == cut
