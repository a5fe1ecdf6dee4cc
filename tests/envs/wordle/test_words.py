from __future__ import annotations

import random
import string

import pytest
import torch

from torchrl_lang.envs.wordle import (
    WordIndex,
    WordleEnv,
    common_words,
    demo_words,
    guess_words,
    load_words,
    wordle_tokenizer,
)


def test_shipped_lists_are_well_formed():
    common, guesses = common_words(), guess_words()
    assert len(common) >= 2000
    assert len(guesses) > len(common)
    assert set(common) <= set(guesses)
    for words in (common, guesses):
        assert load_words(words) == sorted(words)


def test_shipped_lists_cannot_be_changed_by_a_caller():
    common_words().clear()
    assert len(common_words()) >= 2000


def test_demo_words_are_fixed_and_spread():
    random.seed(0)
    state = random.getstate(), torch.get_rng_state()
    words = demo_words(120)
    assert words == demo_words(120) == sorted(set(words))
    assert set(words) <= set(common_words())
    assert len({word[0] for word in words}) > 15
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


@pytest.mark.parametrize("n", [0, -1, 10**6])
def test_demo_words_out_of_range(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        demo_words(n)


def test_load_words_keeps_the_order_of_a_file(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("slate\n crane \nabide\n\n")
    assert load_words(path) == load_words(str(path)) == ["slate", "crane", "abide"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["crane", "four"], "'four' at position 1 .* has 4 characters"),
        (["crane", "sixsix"], "has 6 characters"),
        (["crane", "crane"], "'crane' at position 1 .* is a duplicate of position 0"),
        (["Crane"], "'Crane' at position 0 .* capital letters"),
        (["cran3"], "has '3'"),
        (["naïve"], "has 'ï'"),
        ([], "empty"),
    ],
)
def test_load_words_says_what_is_wrong(words, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_words(words)
    path = tmp_path / "mine.txt"
    path.write_text("\n".join(words), encoding="utf-8")
    with pytest.raises(ValueError, match=message.replace("position 1", "line 2").replace("position 0", "line 1")):
        load_words(path)


def test_load_words_other_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        load_words(tmp_path / "missing.txt")
    with pytest.raises(TypeError, match=r"7 at position 1 .* int"):
        load_words(["crane", 7])
    path = tmp_path / "gap.txt"
    path.write_text("crane\n\nslate\n")
    with pytest.raises(ValueError, match="line 2"):
        load_words(path)


def test_a_byte_order_mark_and_other_line_ends_are_no_part_of_a_word(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfcrane\r\nslate\r\n")
    assert load_words(path) == ["crane", "slate"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"cran\xe9\n",
            r"words\.txt is not UTF-8 text \(byte 4 is 0xe9\): give a text file",
        ),
        (b"\xff\xfec\x00r\x00", r"words\.txt is not UTF-8 text \(byte 0 is 0xff\)"),
        (b"", r"'words\.txt' is empty: give at least one word"),
        (b"\n \n\n", r"'words\.txt' is empty"),
        (b"crane\nslate\ncrane\n", r"'crane' at line 3 of 'words\.txt' is a duplicate of line 1: remove one of them"),
        (b"a" * 100_000, r"'a+\.\.\. at line 1 of 'words\.txt' has 100000 characters"),
    ],
)
def test_files_that_are_no_word_list(content, message, tmp_path):
    path = tmp_path / "words.txt"
    path.write_bytes(content)
    for make in (load_words, WordleEnv, lambda words: WordleEnv(["crane"], guesses=words)):
        with pytest.raises(ValueError, match=message) as caught:
            make(path)
        assert len(str(caught.value)) < 400


def test_a_folder_is_no_word_list(tmp_path):
    with pytest.raises(ValueError, match="is not a regular file: give a text file"):
        load_words(tmp_path)


def test_word_index_finds_words_in_any_order():
    words = ["slate", "crane", "abide", "zebra", "aback"]
    index = WordIndex(words)
    assert index.find(index.letters).tolist() == [0, 1, 2, 3, 4]
    absent = torch.tensor([[0, 0, 0, 0, 0], [25, 25, 25, 25, 25]])
    assert index.find(absent).tolist() == [-1, -1]
    # 'aback' is 0 1 0 2 10: another spelling of the same number to the base 26 with tokens that are no letters.
    assert index.find(torch.tensor([[0, 0, 26, 2, 10]])).tolist() == [-1]
    assert [index.text(row) for row in index.letters] == words


def test_tokenizer_has_the_ids_of_the_paper():
    tokenizer = wordle_tokenizer()
    assert tokenizer.vocab_size == 35
    assert tokenizer.encode(string.ascii_lowercase) == list(range(26))
    assert tokenizer.encode("<g><b><y>") == [26, 27, 28]
    control = tokenizer.control
    assert (control.pad, control.end_of_action, control.end_of_state) == (29, 30, 31)
    assert (control.begin_state, control.begin_action, control.end_of_dialogue) == (32, 33, 34)
