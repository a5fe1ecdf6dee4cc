"""Guess a number from hints: a minimal plain-Python text game."""

import random
from functools import partial

from torchrl_lang.envs import TextGameEnv
from torchrl_lang.text import CharTokenizer


class GuessNumber:
    """Guess a number from 1 to ``n``: "higher", "lower", "?" if it is no number, or "yes"."""

    def __init__(self, n: int = 7) -> None:
        self.n = n

    def reset(self, seed: int) -> str:
        self.number = random.Random(seed).randint(1, self.n)
        return f"1-{self.n}"

    def step(self, text: str) -> tuple[str, float, bool]:
        if not text.isdecimal():
            return "?", -1.0, False
        guess = int(text)
        if guess == self.number:
            return "yes", 0.0, True
        return "higher" if guess < self.number else "lower", -1.0, False


def guess_number_env(n: int = 7, *, max_turns: int = 6, **options) -> TextGameEnv:
    """The game in a row of just the room that it needs."""
    tokenizer = CharTokenizer.from_alphabet([*"0123456789", "-", "?", "higher", "lower", "yes"])
    digits = len(str(n))
    limits = {"row_length": digits + 6 + max_turns * (digits + 4), "action_length": digits + 1, "max_turns": max_turns}
    return TextGameEnv(partial(GuessNumber, n), tokenizer, **limits, **options)
