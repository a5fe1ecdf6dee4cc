"""Rules, sets of possible words, and lists of words."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import letters, plain_feedback
from torchrl_lang.envs.wordle import WordIndex, WordleEnv, demo_words, guess_words, random_words
from torchrl_lang.envs.wordle.rules import CandidateSets, feedback, feedback_code, feedback_table
from torchrl_lang.envs.wordle.words import common_words, load_words

BOTH = pytest.mark.parametrize("rules", ["official", "ilql"])
WORD = st.text(alphabet="abcd", min_size=5, max_size=5)  # few letters: many repeat


@pytest.mark.parametrize(
    ("rules", "guess", "word", "expected"),
    [("ilql", "speed", "abide", "bbyyy"), ("ilql", "eerie", "erase", "gyybg")]
    + [("official", "speed", "abide", "bbyby"), ("official", "eerie", "erase", "gbybg")]
    + [("official", "allee", "lapel", "yyygb")],
)
def test_worked_by_hand(rules, guess, word, expected):
    assert feedback(letters(guess)[0], letters(word)[0], rules).tolist() == ["byg".index(colour) for colour in expected]


@BOTH
@settings(max_examples=100, deadline=None)
@given(guess=WORD, word=WORD)
def test_against_the_rules_in_plain_python(rules, guess, word):
    assert feedback(letters(guess), letters(word), rules).tolist() == [plain_feedback(guess, word, rules)]


@BOTH
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_narrowing_keeps_exactly_the_words_with_those_colours(rules, data):
    """Any guess, on the list or not, and any colours, even ones that no word could give."""
    words = data.draw(st.lists(WORD, min_size=1, max_size=30, unique=True))
    guesses = data.draw(st.lists(WORD, min_size=1, max_size=4))
    any_colours = st.lists(st.integers(0, 2), min_size=5, max_size=5)
    real = [st.sampled_from([plain_feedback(guess, word, rules) for word in words]) for guess in guesses]
    answers = [data.draw(each | any_colours) for each in real]
    sets = CandidateSets(WordIndex(words).letters, rules)
    narrowed = sets.filter(sets.all(len(guesses)), letters(*guesses), torch.tensor(answers))
    expected = [[plain_feedback(g, word, rules) == a for word in words] for g, a in zip(guesses, answers, strict=True)]
    assert sets.members(narrowed).tolist() == expected
    assert sets.size(narrowed).tolist() == [sum(row) for row in expected]
    for row, members in enumerate(expected):
        there = [number for number, member in enumerate(members) if member]
        picked = sets.pick(narrowed[row].expand(len(there), -1), torch.arange(len(there)))
        assert picked.tolist() == there


@pytest.mark.parametrize("shape", [(), (0,), (3, 200)])
@pytest.mark.parametrize("n", [1, 8, 9, 65])
def test_sets_of_any_size(n, shape):
    sets = CandidateSets(WordIndex(guess_words()[:n]).letters)
    members = torch.rand(*shape, n, generator=torch.Generator().manual_seed(n)) < 0.4
    packed = sets.pack(members)
    assert torch.equal(sets.members(packed), members)
    assert sets.size(sets.all(3)).tolist() == [n] * 3
    assert torch.equal(sets.size(packed), members.sum(-1))


@BOTH
def test_a_table_of_several_chunks(rules):
    words = WordIndex(guess_words()[::40]).letters
    direct = feedback_code(feedback(words[:, None], words[None], rules))
    assert torch.equal(feedback_table(words, words, rules).long(), direct.long())


def test_shipped_lists_are_well_formed_and_the_demo_fixed_and_spread():
    common, guesses = common_words(), guess_words()
    assert (len(common), len(guesses)) == (2250, 6706)
    assert set(common) <= set(guesses)
    for words in (common, guesses):
        assert load_words(words) == sorted(words)
    common.clear()
    assert len(common_words()) == len(load_words()) == 2250

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
    for place in (path, str(path), *os.scandir(tmp_path)):  # any os.PathLike
        assert load_words(place) == ["slate", "crane", "abide"]


@pytest.mark.parametrize(
    ("words", "word", "number"),
    [(["crane", "four"], "'four'", 1), (["crane", "crane"], "'crane'", 1), (["Crane"], "'Crane'", 0)]
    + [(["crane", "", "slate"], "''", 1), (["a" * 100_000], "'a", 0), ([], "empty", None)],
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
