"""The exact solver against brute force, bounds worked by hand, and a published optimum."""

import os
import random
from collections import defaultdict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import plain_feedback
from torchrl_lang.envs.wordle import demo_words, solve

RULES = ["official", "ilql"]
ANSWERS, GUESSES = "WORDLE_ANSWERS", "WORDLE_GUESSES"
"""Environment variables with the paths of the newspaper's 2,315 answers and 12,972 guesses."""


def brute_force(words, guesses, rules, max_tries=None):
    """The least total by trying every guess in every state, with nothing left out but guesses that split nothing."""
    colours = {guess: {word: tuple(plain_feedback(guess, word, rules)) for word in words} for guess in guesses}

    @cache
    def least(left_words, tries):
        if not left_words:
            return 0
        if tries == 0:
            return len(left_words)  # lost: one guess more than the game has
        best = None
        for guess in guesses:
            groups = defaultdict(list)
            for word in left_words:
                groups[colours[guess][word]].append(word)
            if len(groups) == 1 and guess not in left_words:
                continue
            rest = [tuple(group) for group in groups.values() if group != [guess]]
            total = len(left_words) + sum(least(group, tries and tries - 1) for group in rest)
            best = total if best is None else min(best, total)
        return best

    return least(tuple(words), max_tries)


WORDS = st.lists(st.text(alphabet="abc", min_size=5, max_size=5), min_size=1, max_size=9, unique=True)


@pytest.mark.parametrize("rules", RULES)
@settings(max_examples=30, deadline=None)
@given(words=WORDS, more=WORDS, max_tries=st.sampled_from([None, 1, 2, 3, 6]))
def test_small_lists_against_brute_force(rules, words, more, max_tries):
    guesses = list(dict.fromkeys([*words, *more]))
    for options, valid in (({}, words), ({"guesses": more}, guesses)):
        tree = solve(words, rules=rules, max_tries=max_tries, progress=False, **options)
        assert tree.total == brute_force(words, valid, rules, max_tries)
        assert set(tree.guesses) <= set(valid)


def two_letter_words(n_letters, count, seed):
    """Words that differ in two places only: bounds are loose and searches deep."""
    letters = "abcdefghijklmnopqrstuvwxy"[:n_letters]
    return random.Random(seed).sample([x + "z" + y + "zz" for x in letters for y in letters], count)


@pytest.mark.parametrize(("n_letters", "count", "max_tries"), [(12, 30, None), (20, 22, None), (16, 24, 4)])
def test_hard_lists_against_brute_force(n_letters, count, max_tries):
    words = two_letter_words(n_letters, count, count)
    tree = solve(words, max_tries=max_tries, progress=False)
    assert tree.total == brute_force(words, words, "official", max_tries)


def test_the_first_guess_can_be_given():
    words = two_letter_words(5, 12, 4)
    totals = {opener: solve(words, opener=opener, progress=False) for opener in words}
    for opener, tree in totals.items():
        assert tree.guesses[0] == opener
        groups = defaultdict(list)
        for word in words:
            groups[tuple(plain_feedback(opener, word, "official"))].append(word)
        rest = (group for group in groups.values() if group != [opener])
        assert tree.total == len(words) + sum(brute_force(group, words, "official") for group in rest)
    best = solve(words, progress=False)
    assert best.total == min(tree.total for tree in totals.values()) == totals[best.guesses[0]].total


def test_words_worked_by_hand():
    """Words that differ in their first letter only: guess them one by one, or first a word with four of the letters."""
    words = ["bight", "fight", "light", "might", "night"]
    alone = solve(words, progress=False)
    assert (alone.total, alone.histogram) == (1 + 2 + 3 + 4 + 5, {1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    helped = solve(words, guesses=["fblmn"], progress=False)
    # All but the word with f have another yellow place.
    assert (helped.total, helped.histogram) == (5 + 5, {2: 5})
    lost = solve(words, max_tries=2, progress=False)
    assert (lost.total, lost.histogram) == (1 + 2 + 3 * 3, {1: 1, 2: 1, 3: 3})


def test_four_hundred_words():
    """Exact and fast: the limit is a minute on one core."""
    tree = solve(demo_words(400), progress=False)
    assert (tree.total, tree.deepest) == (1163, 5)


@pytest.mark.skipif(
    not (os.environ.get(ANSWERS) and os.environ.get(GUESSES)),
    reason=f"set {ANSWERS} and {GUESSES} to files of the newspaper's 2,315 answers and 12,972 guesses, one word a line",
)
def test_the_newspapers_words_after_salet():
    """7,920 guesses, the published optimum (Bertsimas and Paskov, An Exact and Interpretable Solution to Wordle)."""
    tree = solve(os.environ[ANSWERS], guesses=os.environ[GUESSES], opener="salet")
    assert (len(tree.words), tree.total, tree.deepest) == (2315, 7920, 5)
