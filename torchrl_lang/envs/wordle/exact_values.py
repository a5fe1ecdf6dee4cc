"""Exact values of guesses for small sets of words that may still be hidden."""

from __future__ import annotations

from collections import defaultdict

from torchrl_lang.envs.wordle.rules import Rules, feedback_table
from torchrl_lang.envs.wordle.words import WordIndex

__all__ = ["ExactValues"]


class ExactValues:
    """Expected returns of guesses when all later guesses are the best ones that agree with all colours.

    The hidden word is each of the candidates with equal probability, and a guess that is not the hidden word costs 1.
    The number of guesses is not limited.

    Args:
        words: the word list.
        rules: ``"official"`` or ``"ilql"``.

    Examples:
        >>> from torchrl_lang.envs.wordle import ExactValues
        >>> exact = ExactValues(["crane", "slate", "slave"])
        >>> exact.guesses((0, 1, 2))  # "crane" does not separate the other two
        [-1.0, -0.666..., -0.666...]
    """

    def __init__(self, words: list[str], rules: Rules = "official") -> None:
        self._letters = WordIndex(words).letters
        self._rules: Rules = rules
        self._codes: dict[int, list[int]] = {}  # of each guess, for every word
        self._best: dict[tuple[int, ...], float] = {}

    def guesses(self, candidates: tuple[int, ...]) -> list[float]:
        """The value of guessing each of the candidates, which are numbers of words in ascending order."""
        return [self._value(guess, candidates) for guess in candidates]

    def _value(self, guess: int, candidates: tuple[int, ...]) -> float:
        if guess not in self._codes:
            self._codes[guess] = feedback_table(self._letters[guess, None], self._letters, self._rules)[0].tolist()
        groups = defaultdict(list)
        for word in candidates:
            groups[self._codes[guess][word]].append(word)
        left = [tuple(group) for group in groups.values() if guess not in group]
        return sum(len(group) * (self._best_value(group) - 1) for group in left) / len(candidates)

    def _best_value(self, candidates: tuple[int, ...]) -> float:
        if candidates not in self._best:
            self._best[candidates] = max(self.guesses(candidates))
        return self._best[candidates]
