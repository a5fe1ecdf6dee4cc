"""The exact solver against brute force, bounds worked by hand and a published optimum, and its trees."""

import os
import random
from collections import defaultdict
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import letters, plain_feedback
from tests.sealed import reseal
from torchrl_lang._files import FileError
from torchrl_lang.envs import wordle
from torchrl_lang.envs.wordle.tree import DecisionTree

WORDS = wordle.demo_words(40)


@pytest.mark.parametrize("rules", ["official", "ilql"])
def test_paths_depend_on_colours_only_and_a_tree_player_takes_them(rules):
    tree = wordle.solve(WORDS, rules=rules, guesses=["fuzzy"], opener="fuzzy", progress=False)
    next_guess: dict[tuple, str] = {}
    for word, number in zip(WORDS, tree.n_guesses.tolist(), strict=True):
        path, history = tree.path(word), ()
        assert path[-1] == word
        assert len(path) == number
        for guess in path:
            assert next_guess.setdefault(history, guess) == guess
            history += (guess, tuple(plain_feedback(guess, word, rules)))
    found = wordle.expected_return(wordle.TreePlayer(tree), WORDS, rules=rules)
    assert torch.equal(found.returns, 1 - tree.n_guesses.double())
    assert found.mean == pytest.approx(tree.expected_return)
    assert {k: n for k, n in found.histogram.items() if n} == tree.histogram


def test_returns_of_lost_and_invalid_games_and_of_players_that_draw():
    found = wordle.expected_return(wordle.RandomWordPlayer(["crane"], action_length=8), ["slate", "crane"], max_tries=3)
    assert found.returns.tolist() == [-3, 0]
    assert found.histogram == {1: 1, 2: 0, 3: 0, 4: 1}
    assert found.mean == -1.5
    assert wordle.expected_return(wordle.RandomWordPlayer(["fuzzy"]), WORDS, guesses="words", max_tries=2).mean == -2


def test_a_saved_tree_is_the_same_tree(tmp_path):
    for options in ({"rules": "ilql"}, {"max_tries": 2, "guesses": ["fuzzy"]}):
        tree = wordle.solve(WORDS, progress=False, **options)
        tree.save(tmp_path / "tree.json")
        again = DecisionTree.load(tmp_path / "tree.json")
        for name in ("words", "guesses", "replies", "rules", "max_tries", "total", "histogram"):
            assert getattr(again, name) == getattr(tree, name)
        assert torch.equal(again.next_node, tree.next_node)


@pytest.mark.parametrize(
    ("change", "noun"),
    [
        (lambda c: c.update(rules="mine"), "rules"),
        (lambda c: c.update(max_tries=0), "max_tries"),
        (lambda c: c.update(version=1), "has version 1, but"),
        (lambda c: c["guesses"].pop(), "replies"),
        (lambda c: c["replies"][0].update(bbbbb=0), "after their parent"),
        (lambda c: c["replies"][0].update(bbxbb=1), "bbxbb"),
        (lambda c: c["replies"][0].clear(), "no guess that finds"),
        (lambda c: c.update(guesses=[], replies=[]), "at least 1"),
    ],
)
def test_a_damaged_tree_is_refused(tmp_path, change, noun):
    """Even with a digest that fits: every word is followed to its end."""
    path = tmp_path / "tree.json"
    wordle.solve(WORDS, progress=False).save(path)
    reseal(path, change)
    with pytest.raises(FileError, match=f"tree.json .*{noun}"):
        DecisionTree.load(path)


def test_a_tree_by_hand():
    words = ("crane", "slate", "point")
    tree = DecisionTree(words=words, guesses=words, replies=({"bbgbg": 1, "bbbgb": 2}, {}, {}))
    assert tree.histogram == {1: 1, 2: 2}
    only_two = DecisionTree(words=words, guesses=words[:1], replies=({},), max_tries=1)
    assert only_two.n_guesses.tolist() == [1, 2, 2]


def test_games_that_left_the_tree_are_played_by_the_other_player():
    tree = wordle.solve(WORDS, progress=False)
    env = wordle.WordleEnv(WORDS, batch_size=[40])
    td = wordle.TreePlayer(tree)(env.reset(hidden_word=torch.arange(40)))
    strange = torch.arange(40) % 2 == 0
    td["action"][strange, :5] = letters("tummy")
    td = env.step(td)["next"]
    action = wordle.TreePlayer(tree, otherwise=wordle.RandomWordPlayer(["fuzzy"]))(td.clone())["action"]
    assert torch.equal((action[:, :5] == letters("fuzzy")).all(-1), strange)
    for _ in range(5):  # by default it finds the word from there, too
        td = env.step(wordle.TreePlayer(tree, seed=0)(td))["next"]
    assert (td["token_reward"].sum(-1) > -6).double().mean() > 0.95


def test_an_invalid_guess_stays_in_the_tree():
    tree = wordle.solve(WORDS, progress=False)
    env = wordle.WordleEnv(WORDS, batch_size=[40], guesses="words", max_tries=7)
    td = env.reset(hidden_word=torch.arange(40))
    td = env.step(wordle.RandomWordPlayer(["zzzzz"])(td))["next"]
    player = wordle.TreePlayer(tree, otherwise=wordle.RandomWordPlayer(["zzzzz"]))
    for _ in range(6):
        td = env.step(player(td))["next"]
    assert torch.equal(-td["token_reward"].sum(-1).long(), tree.n_guesses)


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


LISTS = st.lists(st.text(alphabet="abc", min_size=5, max_size=5), min_size=1, max_size=9, unique=True)


@pytest.mark.parametrize("rules", RULES)
@settings(max_examples=30, deadline=None)
@given(words=LISTS, more=LISTS, max_tries=st.sampled_from([None, 1, 2, 3, 6]))
def test_small_lists_against_brute_force(rules, words, more, max_tries):
    guesses = list(dict.fromkeys([*words, *more]))
    for options, valid in (({}, words), ({"guesses": more}, guesses)):
        tree = wordle.solve(words, rules=rules, max_tries=max_tries, progress=False, **options)
        assert tree.total == brute_force(words, valid, rules, max_tries)
        assert set(tree.guesses) <= set(valid)


def two_letter_words(n_letters, count, seed):
    """Words that differ in two places only: bounds are loose and searches deep."""
    letters = "abcdefghijklmnopqrstuvwxy"[:n_letters]
    return random.Random(seed).sample([x + "z" + y + "zz" for x in letters for y in letters], count)


@pytest.mark.parametrize(("n_letters", "count", "max_tries"), [(12, 30, None), (20, 22, None), (16, 24, 4)])
def test_hard_lists_against_brute_force(n_letters, count, max_tries):
    words = two_letter_words(n_letters, count, count)
    tree = wordle.solve(words, max_tries=max_tries, progress=False)
    assert tree.total == brute_force(words, words, "official", max_tries)


def test_the_first_guess_can_be_given():
    words = two_letter_words(5, 12, 4)
    totals = {opener: wordle.solve(words, opener=opener, progress=False) for opener in words}
    for opener, tree in totals.items():
        assert tree.guesses[0] == opener
        groups = defaultdict(list)
        for word in words:
            groups[tuple(plain_feedback(opener, word, "official"))].append(word)
        rest = (group for group in groups.values() if group != [opener])
        assert tree.total == len(words) + sum(brute_force(group, words, "official") for group in rest)
    best = wordle.solve(words, progress=False)
    assert best.total == min(tree.total for tree in totals.values()) == totals[best.guesses[0]].total


def test_words_worked_by_hand():
    """Words that differ in their first letter only: guess them one by one, or first a word with four of the letters."""
    words = ["bight", "fight", "light", "might", "night"]
    alone = wordle.solve(words, progress=False)
    assert (alone.total, alone.histogram) == (1 + 2 + 3 + 4 + 5, {1: 1, 2: 1, 3: 1, 4: 1, 5: 1})
    helped = wordle.solve(words, guesses=["fblmn"], progress=False)
    # All but the word with f have another yellow place.
    assert (helped.total, helped.histogram) == (5 + 5, {2: 5})
    lost = wordle.solve(words, max_tries=2, progress=False)
    assert (lost.total, lost.histogram) == (1 + 2 + 3 * 3, {1: 1, 2: 1, 3: 3})


def test_four_hundred_words():
    """Exact and fast: the limit is a minute on one core."""
    tree = wordle.solve(wordle.demo_words(400), progress=False)
    assert (tree.total, tree.deepest) == (1163, 5)


@pytest.mark.skipif(
    not (os.environ.get(ANSWERS) and os.environ.get(GUESSES)),
    reason=f"set {ANSWERS} and {GUESSES} to files of the newspaper's 2,315 answers and 12,972 guesses, one word a line",
)
def test_the_newspapers_words_after_salet():
    """7,920 guesses, the published optimum (Bertsimas and Paskov, An Exact and Interpretable Solution to Wordle)."""
    tree = wordle.solve(os.environ[ANSWERS], guesses=os.environ[GUESSES], opener="salet")
    assert (len(tree.words), tree.total, tree.deepest) == (2315, 7920, 5)
