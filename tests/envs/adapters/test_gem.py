"""Environments with GEM's interface; GEM itself is tested by ``make test-suites``."""

from __future__ import annotations

import random

import numpy as np
import pytest

from torchrl_lang.envs import GemGame, TextGameEnv, check_language_env
from torchrl_lang.text import CharTokenizer

LETTERS = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz0123456789? \n")


class Sums:
    """Sums to add, with the random streams and flags of GEM: single-turn, or two turns with a suffix."""

    def __init__(self, turns=1):
        self.turns = turns

    def reset(self, seed=None):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.left = self.turns
        return self.ask(), {"suffix": "answer?"}

    def ask(self):
        self.numbers = random.randrange(10), int(np.random.randint(10))  # noqa: NPY002
        return "{} and {}".format(*self.numbers)

    def step(self, action):
        self.left -= 1
        reward = float(action == str(sum(self.numbers)))
        text = self.ask() if self.left else "<\N{FULLWIDTH VERTICAL LINE}TERMINAL_STATE\N{FULLWIDTH VERTICAL LINE}>"
        return text, reward, self.left == 0, self.left == 0, {"suffix": "answer?", "prefix": "a "[: 2 * self.left]}


def sums_env(batch_size=(2,), turns=2):
    def make():
        return GemGame(Sums(turns))

    return TextGameEnv(make, LETTERS, row_length=80, action_length=4, batch_size=batch_size, seed=0)


def test_the_rules_of_language_environments():
    check_language_env(sums_env(), lambda n: sums_env([n]), utterances=["3", "10", "a"])


def test_texts_rewards_and_flags():
    game = GemGame(Sums(2), observe=lambda text: text.replace(" and ", " "))
    python = random.getstate()
    numbers = game.reset(5).removesuffix("\nanswer?").split()
    assert random.getstate() == python
    reply, reward, terminated, truncated, _ = game.step(str(sum(map(int, numbers))))
    assert reply.startswith("a ")
    assert reply.endswith("\nanswer?")
    assert (reward, terminated, truncated) == (1.0, False, False)
    assert game.step("no")[:4] == ("", 0.0, True, False)  # GEM reports the end as truncated, too
    game.close()


def test_observations_must_be_texts():
    class Numbers(Sums):
        def ask(self):
            return 3

    with pytest.raises(TypeError, match="observed 3, expected a text"):
        GemGame(Numbers()).reset(0)
