"""Guessing a number in words: a text game with paraphrased replies, its optimum and a player."""

from __future__ import annotations

import random
import re

from torchrl_lang._checks import check_options

_LATER = 0.1
"""Cost of each guess before the right one."""
_TURNS = range(1, 11)  # with more a right guess would cost
_OPENINGS = (
    "I am thinking of a number from 1 to {n}. You have {turns} guesses.",
    "Guess my number! It is between 1 and {n}, and you may guess {turns} times.",
    "Let's play: find the number that I chose from 1 to {n}. You get {turns} tries.",
    "My secret number is one of 1 to {n}. Can you find it in {turns} guesses?",
)
_HIGHER = ("My number is higher.", "No, go higher.", "Higher than that.", "Not quite, think higher.")
_LOWER = ("My number is lower.", "No, go lower.", "Lower than that.", "Not quite, think lower.")
_WON = ("Yes, {number} it is!", "Correct, it is {number}.", "You found it: {number}!")
_LOST = ("No, it was {number}.", "Wrong, my number is {number}.", "That was your last guess. It was {number}.")
_NO_NUMBER = ("Please guess a number from 1 to {n}.", "That is no number from 1 to {n}.")
_HINTS = ("Give me a hint.", "I need a hint.")
_GUESSES = ("Is it {}?", "I guess {}.", "My guess is {}.", "How about {}?", "{}")


class GuessNumber:
    """Find a number in a few guesses; the replies report whether it is higher or lower. A :class:`TextGame`.

    A guess is the first number in a text. The right one ends the game with ``1 - 0.1 (turn - 1)``, and the last guess
    ends it in any case; a text without a number in the range is a wasted guess. The number is ``1 + seed % numbers``,
    so that consecutive seeds play all of them; the phrases are drawn from the seed.

    Args:
        numbers: the numbers are 1 to ``numbers``.
        turns: guesses in a game, at most 10.

    Examples:
        >>> from torchrl_lang.envs.games import GuessNumber
        >>> game = GuessNumber(numbers=15, turns=4)
        >>> game.reset(seed=10)
        'I am thinking of a number from 1 to 15. You have 4 guesses.'
        >>> game.step("Is it 8?")
        ('Not quite, think higher.', 0.0, False)
        >>> game.step("11, I think")
        ('Correct, it is 11.', 0.9, True)
    """

    def __init__(self, *, numbers: int = 15, turns: int = 4) -> None:
        check_options(numbers=(numbers, 1), turns=(turns, _TURNS))
        self.numbers, self.turns = numbers, turns

    def reset(self, seed: int) -> str:
        """See :class:`TextGame`."""
        self._rng, self.number, self._turn = random.Random(seed), 1 + seed % self.numbers, 0
        return self._say(_OPENINGS)

    def step(self, text: str) -> tuple[str, float, bool]:
        """See :class:`TextGame`."""
        self._turn += 1
        guess = next(iter(numbers_in(text)), 0)
        if guess == self.number:
            return self._say(_WON), 1 - _LATER * (self._turn - 1), True
        if self._turn == self.turns:
            return self._say(_LOST), 0.0, True
        if not 1 <= guess <= self.numbers:
            return self._say(_NO_NUMBER), 0.0, False
        return self._say(_HIGHER if guess < self.number else _LOWER), 0.0, False

    def optimal_return(self) -> float:
        """The greatest mean return over all numbers, exact.

        Examples:
            >>> from torchrl_lang.envs.games import GuessNumber
            >>> round(GuessNumber(numbers=7, turns=3).optimal_return(), 4)  # (1 + 2 * 0.9 + 4 * 0.8) / 7
            0.8571
        """
        found = (min(2**turn, max(0, self.numbers + 1 - 2**turn)) for turn in range(self.turns))  # numbers, by turn
        return sum(number * (1 - _LATER * turn) for turn, number in enumerate(found)) / self.numbers

    def _say(self, ways: tuple[str, ...]) -> str:
        return self._rng.choice(ways).format(n=self.numbers, turns=self.turns, number=self.number)


class GuessPlayer:
    """Plays :class:`GuessNumber` as a function for :class:`~torchrl_lang.envs.TextPlayer`.

    It guesses the middle of what is possible, or with some probability asks for a hint, a mistake that
    wastes a guess.

    Args:
        mistakes: the probability of a mistake. At 0 it plays best.

    Examples:
        >>> import random
        >>> from torchrl_lang.envs.games import GuessPlayer
        >>> player = GuessPlayer(mistakes=0.0)
        >>> player(["My secret number is one of 1 to 15. Can you find it in 4 guesses?"], random.Random(1))
        'Is it 8?'
    """

    def __init__(self, *, mistakes: float = 0.4) -> None:
        check_options(mistakes=(mistakes, "[0, 1]"))
        self.mistakes = mistakes

    def __call__(self, texts: list[str], rng: random.Random) -> str:
        """The next guess after the texts of a game so far."""
        if rng.random() < self.mistakes:
            return rng.choice(_HINTS)
        low, high = 1, numbers_in(texts[0])[1]
        for said, reply in zip(texts[1::2], texts[2::2], strict=True):
            for guess in numbers_in(said)[:1]:
                if "higher" in reply.lower():
                    low = max(low, guess + 1)
                else:
                    high = min(high, guess - 1)
        return rng.choice(_GUESSES).format((low + high) // 2)


def numbers_in(text: str) -> list[int]:
    """The numbers in a text, in order."""
    return [int(number) for number in re.findall(r"\d{1,9}", text)]
