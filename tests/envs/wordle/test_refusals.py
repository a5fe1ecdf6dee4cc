"""What is refused, one row a check of Wordle's own; ranges of options are tested in ``test_checks.py``."""

import math

import pytest
import torch

from torchrl_lang.envs.wordle import (
    MixturePlayer,
    OptimalPlayer,
    RandomWordPlayer,
    RepeatPlayer,
    WordleEnv,
    WrongPlayer,
    demo_words,
    expected_return,
    random_words,
    solve,
)
from torchrl_lang.envs.wordle.human import HumanGames
from torchrl_lang.envs.wordle.rules import unpack_words
from torchrl_lang.envs.wordle.samplers import AdversarialGames, rows_before
from torchrl_lang.envs.wordle.tree import DecisionTree
from torchrl_lang.schema import ROW_KEYS

WORDS = ("crane", "slate", "point")
HUMAN = HumanGames([("crane", [0, 242])] * 3, WORDS)


def mixture(*probabilities):
    return MixturePlayer([RandomWordPlayer(WORDS)] * 2, probabilities)


@pytest.mark.parametrize(
    ("call", "noun"),
    [
        *((lambda name=name, value=value: WordleEnv(**{name: value}), name) for name, value in
          {"max_tries": 0, "consistent": "bits", "action_length": 5, "rules": "mine"}.items()),
        (lambda: WordleEnv(["Slate"]), "Slate"),
        (lambda: unpack_words(torch.zeros(1, 1, dtype=torch.uint8), 9), "9 words"),
        (lambda: RandomWordPlayer(WORDS, prob_smart=1.5), "prob_smart"),
        (lambda: RepeatPlayer(WORDS, first_n=0), "first_n"),
        (lambda: WrongPlayer(WORDS, action_length=5), "action_length"),
        (lambda: WrongPlayer(WORDS, rules="mine"), "rules"),
        (lambda: WrongPlayer(WORDS, openers=["Crane"]), "Crane"),
        *((lambda chances=chances: mixture(*chances), "sum to one") for chances in
          ([0.5, 0.6], [1.0], [1.5, -0.5], [math.nan, 1])),
        (lambda: MixturePlayer([RandomWordPlayer(WORDS)], per="turn"), "per"),
        (lambda: MixturePlayer([]), "players"),
        (lambda: solve(WORDS, opener="fuzzy"), "opener"),
        (lambda: solve(WORDS, max_tries=0), "max_tries"),
        (lambda: solve(WORDS, guesses=["Slate"]), "Slate"),
        (lambda: demo_words(10**6), f"{10**6}"),
        (lambda: random_words(3, WORDS[:2]), "larger sample"),
        (lambda: AdversarialGames(WordleEnv(WORDS, [1]), adversarial_games=-1), "adversarial_games"),
        (lambda: rows_before(WordleEnv(WORDS, [1]).reset().select(*ROW_KEYS), torch.tensor([6])), "turn must"),
        (lambda: expected_return(OptimalPlayer(demo_words(60), seed=0), demo_words(60)), "draws its guesses"),
        (lambda: solve(WORDS, progress=False).path("fuzzy"), "fuzzy"),
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
