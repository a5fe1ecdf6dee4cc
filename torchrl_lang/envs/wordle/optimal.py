"""The myopic-optimal policy, which plays the possible word with the largest information gain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_lang._checks import checked
from torchrl_lang.envs.wordle.players import WordPlayer
from torchrl_lang.envs.wordle.rules import SOLVED, Rules, feedback_code, feedback_table
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import WordIndex, WordList, load_words, word_number, words_and_guesses

_CODES = SOLVED + 1

_TIE = 1e-9
"""Gains that differ by less are equal: rounding is below 1e-11."""


def information_gain(table: Tensor) -> Tensor:
    """Information gain of each guess about the hidden word, in nats, if it is uniform over the words.

    With ``c`` words, of which ``n_o`` give a guess the colours ``o``, the gain is the entropy of the colours,
    ``log c - sum_o (n_o / c) log n_o`` (ILQL's expert policy, Snell et al. 2022, arXiv 2206.11871).

    Args:
        table: codes of each guess for each word, uint8 ``[G, c]``.

    Returns:
        float64 ``[G]``.

    Examples:
        >>> from torchrl_lang.envs.wordle import WordIndex
        >>> from torchrl_lang.envs.wordle.optimal import information_gain
        >>> from torchrl_lang.envs.wordle.rules import feedback_table
        >>> letters = WordIndex(["brake", "crake", "drake", "cadre"]).letters
        >>> information_gain(feedback_table(letters, letters)).exp()  # cadre gets four different colourings
        tensor([2.8284, 2.8284, 2.8284, 4.0000], dtype=torch.float64)
    """
    n_guesses, n_words = table.shape
    n = torch.arange(n_words + 1, dtype=torch.float64, device=table.device)
    n_log_n = torch.special.xlogy(n, n)
    # This many guesses fit into the processor's cache, and their bins into int16.
    step = min(max(1, 2**17 // n_words), 2**15 // _CODES)
    first_bin = _CODES * torch.arange(step, dtype=torch.int16, device=table.device)[:, None]
    expected = torch.empty(n_guesses, dtype=torch.float64, device=table.device)
    for start in range(0, n_guesses, step):
        codes = table[start : start + step].to(torch.int16)
        bins = (codes + first_bin[: codes.shape[0]]).flatten()
        count = torch.bincount(bins, minlength=codes.shape[0] * _CODES)
        expected[start : start + step] = n_log_n.index_select(0, count).view(-1, _CODES).sum(-1)
    return n[-1].log() - expected / n_words


class OptimalPlayer(WordPlayer):
    """Plays the word with the largest information gain (:func:`information_gain`) among those that fit all colours.

    The ILQL paper's expert. Results are cached per state of the game, so
    the cost grows with the number of distinct states, not of games. If no word fits a row, it plays any word.

    With ``guesses`` it chooses among all these guesses, whether they fit the colours or not. Of equal guesses it plays
    one that fits, if there is any. Both forms look one guess ahead; :func:`solve` finds the optimum.

    Args:
        words: see :class:`WordPlayer`; these are also the possible hidden words.
        guesses: the guesses to choose from: ``"words"`` for all words, or a list or path of more words (the possible
            hidden words are always among them). Default: the words that fit all colours.
        ties: ``"random"`` draws one of the equal guesses, ``"first"`` plays the first on the list and makes the player
            deterministic.
        **kwargs: see :class:`WordPlayer`.

    Examples:
        >>> from torchrl_lang.envs.wordle import OptimalPlayer, WordIndex, WordleEnv
        >>> words = ["brake", "crake", "drake", "cadre"]
        >>> env, player = WordleEnv(words, batch_size=[8], seed=0), OptimalPlayer(words, seed=0)
        >>> games = env.rollout(2, player, break_when_any_done=False)
        >>> WordIndex.text(games["action"][0, 0, :5])
        'cadre'
    """

    table: Tensor
    """Codes of each guess for each word, uint8 ``[G, W]``; the first guesses are the words."""

    @checked
    def __init__(
        self,
        words: WordList | None = None,
        *,
        guesses: WordList | None = None,
        ties: Literal["random", "first"] = "random",
        **kwargs: Any,
    ) -> None:
        word_list = load_words(words)
        super().__init__(word_list, **kwargs)
        self.only_fitting, self.ties = guesses is None, ties
        self.guesses = self.index if guesses is None else WordIndex(words_and_guesses(word_list, guesses))
        table = feedback_table(self.guesses.letters, self.index.letters, self.sets.rules)
        self.register_buffer("table", table, persistent=False)
        self._best: dict[bytes, Sequence[int]] = {}

    def _choose_word(self, turns: Turns) -> Tensor:
        states = self._states(turns)
        new = {state: row for row, state in enumerate(states) if state not in self._best}
        if new:
            index = torch.tensor(list(new.values()), device=turns.tries.device)
            self._best.update(zip(new, self.best_words(turns.rows(index)), strict=True))
        draws = self.uniform(turns.tries).tolist() if self.ties == "random" else [0.0] * len(states)
        ties = [self._best[state] for state in states]
        return self.guesses.letters[[best[int(draw * len(best))] for best, draw in zip(ties, draws, strict=True)]]

    def best_words(self, turns: Turns) -> list[Sequence[int]]:
        """For each game the indices of all guesses with the largest gain; all words if none is possible."""
        possible = turns.filter(self.sets)
        sizes = self.sets.size(possible).tolist()
        members = self.sets.members(possible).nonzero()[:, 1].split(sizes)
        return [self._best_of(words) for words in members]

    def _best_of(self, words: Tensor) -> Sequence[int]:
        n = words.shape[0]
        if n == 0:
            return range(len(self.index))
        if n <= 2:  # either of two words shows which one is hidden
            return words.tolist()
        if self.only_fitting:
            table = self.table if n == len(self.index) else self.table[words[:, None], words]
            gain = information_gain(table)
            return words[gain > gain.max() - _TIE].tolist()
        gain = information_gain(self.table.index_select(1, words))
        best = gain > gain.max() - _TIE
        fitting = words[best[words]]
        return (fitting if len(fitting) else best.nonzero().squeeze(-1)).tolist()

    @staticmethod
    def _states(turns: Turns) -> list[bytes]:
        """The colours of each game so far, independent of the order of the guesses."""
        codes = word_number(turns.guess) * _CODES + feedback_code(turns.colours)
        place = torch.arange(codes.shape[1], device=codes.device)
        codes = torch.where(place < turns.answered[:, None], codes, -1).sort(-1).values
        data = codes.cpu().numpy().tobytes()
        size = codes.shape[1] * codes.element_size()
        return [data[start : start + size] for start in range(0, len(data), size)]


class ExactValues:
    """Expected returns of guesses when all later guesses are the best ones that agree with all colours.

    The hidden word is each of the candidates with equal probability, and a guess that is not the hidden word costs 1.
    The number of guesses is not limited.

    Args:
        words: the word list.
        rules: ``"official"`` or ``"ilql"``.

    Examples:
        >>> from torchrl_lang.envs.wordle.optimal import ExactValues
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
