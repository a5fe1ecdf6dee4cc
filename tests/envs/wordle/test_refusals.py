"""What is refused, one row a check of Wordle's own; ranges of options are tested in ``test_checks.py``."""

import math

import pytest
import torch

from torchrl_lang.envs import wordle
from torchrl_lang.envs.wordle.human import HumanGames
from torchrl_lang.envs.wordle.samplers import AdversarialGames, rows_before
from torchrl_lang.envs.wordle.tree import DecisionTree
from torchrl_lang.schema import ROW_KEYS

WORDS, MANY = ("crane", "slate", "point"), wordle.demo_words(60)
HUMAN = HumanGames([("crane", [0, 242])] * 3, WORDS)


def mixture(*probabilities):
    return wordle.MixturePlayer([wordle.RandomWordPlayer(WORDS)] * 2, probabilities)


@pytest.mark.parametrize(
    ("call", "noun"),
    [
        *((lambda name=name, value=value: wordle.WordleEnv(**{name: value}), name) for name, value in
          {"max_tries": 0, "consistent": "bits", "action_length": 5, "rules": "mine"}.items()),
        (lambda: wordle.WordleEnv(["Slate"]), "Slate"),
        (lambda: wordle.RandomWordPlayer(WORDS, prob_smart=1.5), "prob_smart"),
        (lambda: wordle.WrongPlayer(WORDS, action_length=5), "action_length"),
        (lambda: wordle.WrongPlayer(WORDS, openers=["Crane"]), "Crane"),
        *((lambda chances=chances: mixture(*chances), "sum to one") for chances in
          ([0.5, 0.6], [1.0], [1.5, -0.5], [math.nan, 1])),
        (lambda: wordle.MixturePlayer([wordle.RandomWordPlayer(WORDS)], per="turn"), "per"),
        (lambda: wordle.MixturePlayer([]), "players"),
        (lambda: wordle.solve(WORDS, opener="fuzzy"), "opener"),
        (lambda: wordle.solve(WORDS, guesses=["Slate"]), "Slate"),
        (lambda: wordle.demo_words(10**6), f"{10**6}"),
        (lambda: wordle.random_words(3, WORDS[:2]), "larger sample"),
        (lambda: AdversarialGames(wordle.WordleEnv(WORDS, [1]), adversarial_games=-1), "adversarial_games"),
        (lambda: rows_before(wordle.WordleEnv(WORDS, [1]).reset().select(*ROW_KEYS), torch.tensor([6])), "turn must"),
        (lambda: wordle.expected_return(wordle.OptimalPlayer(MANY, seed=0), MANY), "draws its guesses"),
        (lambda: wordle.solve(WORDS, progress=False).path("fuzzy"), "fuzzy"),
        (lambda: DecisionTree(words=WORDS, guesses=WORDS[:2], replies=({"bbgbg": 1}, {})), "finds 'point'"),
        (lambda: HUMAN.split(1.0), "no games"),
        (lambda: HUMAN.best(0.01), "no games"),
        (lambda: HUMAN.best(math.nan), "fraction"),
        *((lambda codes=codes: HumanGames([("crane", codes)], WORDS), "1 to 6 codes from 0 to 242") for codes in
          ([], [0] * 7, [243], [-1])),
    ],
)  # fmt: skip
def test_refusals(call, noun):
    with pytest.raises(ValueError, match=noun):
        call()
