import pytest
import torch

from torchrl_lang.envs.wordle import WordIndex, WordleEnv, demo_words, guess_words, random_words
from torchrl_lang.envs.wordle.words import common_words, load_words


def test_shipped_lists_are_well_formed():
    common, guesses = common_words(), guess_words()
    assert (len(common), len(guesses)) == (2250, 6706)
    assert set(common) <= set(guesses)
    for words in (common, guesses):
        assert load_words(words) == sorted(words)
    common.clear()
    assert len(common_words()) == len(load_words()) == 2250


def test_demo_words_are_fixed_and_spread():
    state = torch.get_rng_state()
    words = demo_words(120)
    assert words == demo_words(120) == sorted(set(words))
    assert len({word[0] for word in words}) > 15
    assert torch.equal(torch.get_rng_state(), state)


def test_subsets_are_random_seeded_and_united_with_given_words(tmp_path):
    some = random_words(50, seed=1)
    assert len(set(some)) == 50 <= len(set(common_words()) & set(some))
    assert some == sorted(some) == random_words(50, seed=1) != random_words(50, seed=2)
    assert set(random_words(50, include=["zzzzz", some[0]], seed=1)) == {*some, "zzzzz"}
    (tmp_path / "words.txt").write_text("crane\nslate\n")
    assert random_words(2, tmp_path / "words.txt") == ["crane", "slate"]
    assert random_words(0, include=tmp_path / "words.txt") == ["crane", "slate"]


@pytest.mark.parametrize("content", [b"slate\n crane \nabide\n\n", b"\xef\xbb\xbfslate\r\ncrane\r\nabide\r\n"])
def test_the_order_of_a_file_is_kept_with_a_byte_order_mark_and_other_line_ends(tmp_path, content):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    assert load_words(path) == load_words(str(path)) == ["slate", "crane", "abide"]


@pytest.mark.parametrize(
    ("words", "word", "number"),
    [
        (["crane", "four"], "'four'", 1),
        (["crane", "crane"], "'crane'", 1),
        (["Crane"], "'Crane'", 0),
        (["crane", "", "slate"], "''", 1),
        (["a" * 100_000], "'a", 0),
        ([], "empty", None),
    ],
)
def test_what_is_no_word_list_is_named_with_its_place(words, word, number, tmp_path):
    with pytest.raises(ValueError, match=word if number is None else f"{word}.* position {number}"):
        load_words(words)
    path = tmp_path / "words.txt"
    path.write_text("\n".join(words), encoding="utf-8")
    for make in (load_words, lambda words: WordleEnv(["crane"], guesses=words)):
        with pytest.raises(ValueError, match=word if number is None else f"{word}.* line {number + 1}") as caught:
            make(path)
        assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="missing"):
        load_words(tmp_path / "missing.txt")


def test_word_index_finds_words_in_any_order():
    words = ["slate", "crane", "abide", "zebra", "aback"]
    index = WordIndex(words)
    assert index.find(index.letters).tolist() == [0, 1, 2, 3, 4]
    assert index.find(torch.tensor([[0, 0, 0, 0, 0], [25, 25, 25, 25, 25]])).tolist() == [-1, -1]
    # 'aback' is 0 1 0 2 10: another spelling of the same number to the base 26 with tokens that are no letters.
    assert index.find(torch.tensor([[0, 0, 26, 2, 10]])).tolist() == [-1]
    assert [index.text(row) for row in index.letters] == words
