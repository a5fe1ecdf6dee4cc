"""Guess a number from hints: a minimal plain-Python text game."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Unpack

from torchrl_lang.envs.seeded_env import EnvOptions
from torchrl_lang.envs.text_game import TextGameEnv
from torchrl_lang.text.tokenizers import CharTokenizer


class GuessNumber:
    """Guess a number from 1 to ``n``; the game answers ``higher`` or ``lower``. Each wrong guess has reward -1.

    Args:
        n: the largest number.

    Examples:
        >>> from torchrl_lang.envs.games.guess_number import GuessNumber
        >>> game = GuessNumber(7)
        >>> game.reset(seed=0)
        '1-7'
        >>> game.step("4")
        ('higher', -1.0, False)
        >>> game.step("seven")
        ('?', -1.0, False)
        >>> game.step("7")
        ('yes', 0.0, True)
    """

    def __init__(self, n: int = 7) -> None:
        self.n = n

    def reset(self, seed: int) -> str:
        """Draw a number; returns the range."""
        self.number = random.Random(seed).randint(1, self.n)
        return f"1-{self.n}"

    def step(self, text: str) -> tuple[str, float, bool]:
        """Return the hint, the reward of the guess, and whether it was right."""
        if not re.fullmatch("[0-9]{1,9}", text):
            return "?", -1.0, False
        guess = int(text)
        if guess == self.number:
            return "yes", 0.0, True
        return "higher" if guess < self.number else "lower", -1.0, False


def guess_number_env(n: int = 7, *, max_turns: int = 6, **options: Unpack[EnvOptions]) -> TextGameEnv:
    """The game as a batched language environment, with a vocabulary of 21 tokens.

    Examples:
        >>> from torchrl_lang.envs.games.guess_number import guess_number_env
        >>> env = guess_number_env(batch_size=[2])
        >>> env.tokenizer.decode(env.reset()["tokens"][0, :5])
        '<s>1-7</s>'
    """
    tokenizer = CharTokenizer.from_alphabet([*"0123456789", "-", "?", "higher", "lower", "yes"])
    digits = len(str(n))
    # The opening, a guess and a hint with their ends per turn, and the end-of-dialogue token.
    row_length = digits + 4 + max_turns * (digits + 4) + 2
    return TextGameEnv(
        partial(GuessNumber, n),
        tokenizer,
        row_length=row_length,
        action_length=digits + 1,
        max_turns=max_turns,
        **options,
    )
