import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import letters, plain_feedback, turns_of
from torchrl_lang.envs.wordle import OptimalPlayer, demo_words
from torchrl_lang.envs.wordle.optimal import information_gain
from torchrl_lang.envs.wordle.rules import feedback_table

WORDS = st.lists(st.text(alphabet="abcd", min_size=5, max_size=5), min_size=1, max_size=14, unique=True)


def exact_gain(sizes: Counter) -> tuple[tuple[int, int], ...]:
    """``prod n^n`` over the group sizes, as prime powers: equal if and only if the information gains are."""
    powers: Counter = Counter()
    for n in sizes.values():
        rest = n
        for prime in (2, 3, 5, 7, 11, 13):
            while rest % prime == 0:
                powers[prime] += n
                rest //= prime
    return tuple(sorted(powers.items()))


@pytest.mark.parametrize("rules", ["official", "ilql"])
@settings(max_examples=60, deadline=None)
@given(words=WORDS, more=st.none() | WORDS, data=st.data())
def test_best_guesses_against_brute_force_with_exact_ties(rules, words, more, data):
    """Among the words that fit, or among all guesses where ``more`` are given."""
    hidden = data.draw(st.sampled_from(words))
    guesses = data.draw(st.lists(st.text(alphabet="abcd", min_size=5, max_size=5), max_size=2))
    history = [(guess, plain_feedback(guess, hidden, rules)) for guess in guesses]
    possible = [w for w in words if all(plain_feedback(guess, w, rules) == answer for guess, answer in history)]
    every = possible if more is None else list(dict.fromkeys([*words, *more]))
    groups = {g: Counter(tuple(plain_feedback(g, w, rules)) for w in possible) for g in every}
    gain = {g: -sum(n / len(possible) * math.log(n / len(possible)) for n in c.values()) for g, c in groups.items()}
    best = exact_gain(groups[max(every, key=gain.__getitem__)])
    ties = [guess for guess in every if exact_gain(groups[guess]) == best]
    expected = possible if len(possible) <= 2 else [guess for guess in ties if guess in possible] or ties
    player = OptimalPlayer(words, guesses=more, rules=rules, ties="random" if more is None else "first", seed=0)
    turns = turns_of([(guess, hidden) for guess in guesses], rules=rules)
    (found,) = player.best_words(turns)
    names = list(dict.fromkeys([*words, *(more or ())]))
    assert [names[number] for number in found] == expected
    assert player.index.text(player.choose(turns)[0]) in (expected if more is None else expected[:1])


def test_gain_of_many_guesses_is_the_gain_of_each():
    words = letters(*demo_words(900))  # several chunks
    table = feedback_table(words, words)
    gain = information_gain(table)
    for row in (0, 133, 134, 135, 500, 899):
        share = table[row].to(torch.int64).bincount().double() / 900
        assert gain[row].item() == pytest.approx(-torch.special.xlogy(share, share).sum().item(), abs=1e-12)


def test_where_nothing_is_possible_any_word_is_played():
    (found,) = OptimalPlayer(["crane", "slate"], seed=0).best_words(turns_of([("crane", "fuzzy")]))
    assert list(found) == [0, 1]
