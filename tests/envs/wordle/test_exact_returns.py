"""Expected returns of players, against values computed here by going through all games in plain Python."""

import math
from collections import Counter
from functools import cache

import pytest

from tests.envs.wordle.helpers import plain_feedback
from torchrl_lang.envs import wordle
from torchrl_lang.evaluation import play_games

WORDS = ["crane", "crate", "grate", "slate", "eerie", "tummy"]
STARTS = ["eerie", "stare", "fuzzy"]
MORE = ["teeth", "crown"]
TRIES = 4


def even(guesses):
    return {guess: 1 / len(guesses) for guess in guesses}


def mixed(first, second, weight):
    chances = Counter({guess: weight * chance for guess, chance in first.items()})
    for guess, chance in second.items():
        chances[guess] += (1 - weight) * chance
    return chances


def fits(word, history, rules):
    return all(tuple(plain_feedback(guess, word, rules)) == colours for guess, colours in history)


def smart(history, rules):
    return even([word for word in WORDS if fits(word, history, rules)] or WORDS)


def wrong(history, rules):
    return even([word for word in WORDS if not fits(word, history, rules)] or WORDS)


def repeat(history, rules):
    return Counter(guess for guess, _ in history[:1]) or even(WORDS)


def start_word(history, rules):
    return even([word for word in STARTS if fits(word, history, rules)] or list(smart(history, rules)))


def by_gain(among):
    def chances(history, rules):
        left = list(smart(history, rules))
        if len(left) <= 2:
            return even(left)
        guesses = left if among is None else among

        def gain(guess):
            groups = Counter(tuple(plain_feedback(guess, word, rules)) for word in left)
            return -sum(n * math.log(n) for n in groups.values())

        best = [guess for guess in guesses if gain(guess) > max(map(gain, guesses)) - 1e-9]
        return even([guess for guess in best if guess in left] or best)

    return chances


def smart_player(**options):
    return wordle.RandomWordPlayer(WORDS, prob_smart=1.0, **options)


def mixture(seed, **options):
    players = [smart_player(seed=seed, **options), wordle.WrongPlayer(WORDS, seed=seed + 1, **options)]
    return wordle.MixturePlayer(players, [0.6, 0.4], seed=seed + 2)


def search(**options):
    return wordle.MonteCarloPlayer(smart_player(**options), WORDS, samples=1, max_tries=TRIES, **options)


PLAYERS = {
    "smart": (smart_player, smart),
    "wrong": (lambda **o: wordle.WrongPlayer(WORDS, **o), wrong),
    "repeat": (lambda **o: wordle.RepeatPlayer(WORDS, first_n=1, **o), repeat),
    "start word": (lambda **o: wordle.StartWordPlayer(WORDS, starts=STARTS, **o), start_word),
    "optimal": (lambda **o: wordle.OptimalPlayer(WORDS, **o), by_gain(None)),
    "optimal, guess list": (lambda **o: wordle.OptimalPlayer(WORDS, guesses=MORE, **o), by_gain(WORDS + MORE)),
    "mixture of two": (mixture, lambda history, rules: mixed(smart(history, rules), wrong(history, rules), 0.6)),
    "Monte Carlo of one game": (search, smart),  # which plays as its player does
}


def exact(policy, rules, tries=TRIES):
    """The expected return by going through all hidden words, guesses and replies."""

    @cache
    def value(history, hidden):
        total = 0.0
        for guess, chance in policy(history, rules).items():
            if guess != hidden:
                reply = guess, tuple(plain_feedback(guess, hidden, rules))
                later = value((*history, reply), hidden) if len(history) + 1 < tries else 0.0
                total += chance * (later - 1)
        return total

    return sum(value((), hidden) for hidden in WORDS) / len(WORDS)


@pytest.mark.parametrize("rules", ["official", "ilql"])
@pytest.mark.parametrize("name", PLAYERS)
def test_mean_of_many_games_is_the_exact_value(name, rules):
    make, policy = PLAYERS[name]
    env = wordle.WordleEnv(WORDS, batch_size=[2000], rules=rules, max_tries=TRIES)
    returns = play_games(env, make(rules=rules, seed=5), games=2000, seed=1).returns.double()
    assert abs(returns.mean() - exact(policy, rules)) < 4 * returns.std() / math.sqrt(2000) + 1e-9
