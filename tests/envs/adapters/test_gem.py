"""Environments with GEM's interface; GEM itself is tested by ``make test-suites``."""

import random

import numpy as np
import pytest

from tests.envs.helpers import check_game
from torchrl_lang.envs import GemGame


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


def test_the_rules_of_language_environments():
    check_game(lambda: GemGame(Sums(2)), "3", "10", "a", row_length=80, action_length=4)


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
    with pytest.raises(TypeError, match="NoneType"):
        GemGame(Sums(), observe=lambda text: None).reset(0)
