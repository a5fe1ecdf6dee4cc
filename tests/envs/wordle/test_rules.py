import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import letters, plain_feedback
from torchrl_lang.envs.wordle import WordIndex, guess_words
from torchrl_lang.envs.wordle.rules import CandidateSets, feedback, feedback_code, feedback_table

BOTH = pytest.mark.parametrize("rules", ["official", "ilql"])
WORDS = st.text(alphabet="abcd", min_size=5, max_size=5)  # few letters: many repeat


@pytest.mark.parametrize(
    ("rules", "guess", "word", "expected"),
    [
        ("ilql", "speed", "abide", "bbyyy"),
        ("ilql", "eerie", "erase", "gyybg"),
        ("official", "speed", "abide", "bbyby"),
        ("official", "eerie", "erase", "gbybg"),
        ("official", "allee", "lapel", "yyygb"),
    ],
)
def test_worked_by_hand(rules, guess, word, expected):
    assert feedback(letters(guess)[0], letters(word)[0], rules).tolist() == ["byg".index(colour) for colour in expected]


@BOTH
@settings(max_examples=100, deadline=None)
@given(guess=WORDS, word=WORDS)
def test_against_the_rules_in_plain_python(rules, guess, word):
    assert feedback(letters(guess), letters(word), rules).tolist() == [plain_feedback(guess, word, rules)]


@BOTH
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_narrowing_keeps_exactly_the_words_with_those_colours(rules, data):
    """Any guess, on the list or not, and any colours, even ones that no word could give."""
    words = data.draw(st.lists(WORDS, min_size=1, max_size=30, unique=True))
    guesses = data.draw(st.lists(WORDS, min_size=1, max_size=4))
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
