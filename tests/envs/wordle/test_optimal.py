from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.wordle.helpers import letters, plain_feedback
from torchrl_lang.envs.wordle import OptimalPlayer, WordleEnv, demo_words
from torchrl_lang.envs.wordle.optimal import information_gain
from torchrl_lang.envs.wordle.rules import feedback_table
from torchrl_lang.envs.wordle.transcript import Turns

WORDS = st.lists(st.text(alphabet="abcd", min_size=5, max_size=5), min_size=1, max_size=14, unique=True)


def turns_of(history: list[tuple[str, list[int]]]) -> Turns:
    guess, colours = torch.zeros(1, 6, 5, dtype=torch.int64), torch.zeros(1, 6, 5, dtype=torch.int64)
    for turn, (word, answer) in enumerate(history):
        guess[0, turn], colours[0, turn] = letters(word)[0], torch.tensor(answer)
    count = torch.tensor([len(history)])
    return Turns(guess, colours, count, count)


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
@given(words=WORDS, data=st.data())
def test_best_words_against_brute_force_with_exact_ties(rules, words, data):
    hidden = data.draw(st.sampled_from(words))
    guesses = data.draw(st.lists(st.text(alphabet="abcd", min_size=5, max_size=5), max_size=2))
    history = [(guess, plain_feedback(guess, hidden, rules)) for guess in guesses]
    possible = [w for w in words if all(plain_feedback(guess, w, rules) == answer for guess, answer in history)]
    groups = {g: Counter(tuple(plain_feedback(g, w, rules)) for w in possible) for g in possible}
    gain = {g: -sum(n / len(possible) * math.log(n / len(possible)) for n in c.values()) for g, c in groups.items()}
    best = exact_gain(groups[max(possible, key=gain.__getitem__)])
    ties = [word for word in possible if exact_gain(groups[word]) == best]
    player = OptimalPlayer(words, rules=rules, seed=0)
    (found,) = player.best_words(turns_of(history))
    assert [words[number] for number in found] == ties
    assert player.index.text(player.choose(turns_of(history))[0]) in ties


@pytest.mark.parametrize("rules", ["official", "ilql"])
@settings(max_examples=60, deadline=None)
@given(words=WORDS, more=WORDS, data=st.data())
def test_best_of_all_guesses_against_brute_force(rules, words, more, data):
    hidden, guess = data.draw(st.sampled_from(words)), data.draw(st.text(alphabet="abcd", min_size=5, max_size=5))
    history = [(guess, plain_feedback(guess, hidden, rules))]
    possible = [word for word in words if plain_feedback(guess, word, rules) == history[0][1]]
    guesses = list(dict.fromkeys([*words, *more]))
    groups = {g: Counter(tuple(plain_feedback(g, w, rules)) for w in possible) for g in guesses}
    gain = {g: -sum(n / len(possible) * math.log(n / len(possible)) for n in c.values()) for g, c in groups.items()}
    best = exact_gain(groups[max(guesses, key=gain.__getitem__)])
    ties = [g for g in guesses if exact_gain(groups[g]) == best]
    fitting = [g for g in ties if g in possible]
    player = OptimalPlayer(words, guesses=more, rules=rules, ties="first")
    (found,) = player.best_words(turns_of(history))
    assert [guesses[number] for number in found] == (possible if len(possible) <= 2 else fitting or ties)
    assert player.index.text(player.choose(turns_of(history))[0]) == guesses[found[0]]


def test_gain_worked_by_hand():
    words = letters("brake", "crake", "drake", "cadre")
    gain = information_gain(feedback_table(words, words))
    two_groups = math.log(4) - 0.5 * math.log(2)  # brake gets one answer of itself, one of two words, one of cadre
    assert gain.tolist() == pytest.approx([two_groups] * 3 + [math.log(4)])
    assert information_gain(torch.zeros(3, 1, dtype=torch.uint8)).tolist() == [0, 0, 0]


def test_gain_of_many_guesses_is_the_gain_of_each():
    words = letters(*demo_words(900))  # several chunks
    table = feedback_table(words, words)
    gain = information_gain(table)
    for row in (0, 133, 134, 135, 500, 899):
        share = table[row].to(torch.int64).bincount().double() / 900
        assert gain[row].item() == pytest.approx(-torch.special.xlogy(share, share).sum().item(), abs=1e-12)


def test_it_remembers_states_not_games():
    words = demo_words(60)
    player = OptimalPlayer(words, seed=0)

    def played():
        player.stream.generator.manual_seed(0)
        games = WordleEnv(words, batch_size=[300], seed=0).rollout(6, player, break_when_any_done=False)
        return games["action"], len(player._best)

    first, known = played()
    find, player.best_words = player.best_words, None  # what it remembers must do for the same games
    again, still_known = played()
    assert torch.equal(first, again)
    assert 0 < known == still_known
    player.forget()
    player.best_words = find
    again, found_again = played()
    assert torch.equal(first, again)
    assert found_again == known


def test_where_nothing_is_possible_any_word_is_played():
    player = OptimalPlayer(["crane", "slate"], seed=0)
    (found,) = player.best_words(turns_of([("crane", [1, 1, 1, 1, 1])]))
    assert list(found) == [0, 1]
