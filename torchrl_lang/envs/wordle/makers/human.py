"""Games of people, of which only the colours are known: guesses are found that would get them."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._files import json_digest
from torchrl_lang.data import GameMaker, seed_of_games
from torchrl_lang.envs.wordle.makers.continuing import TRIES
from torchrl_lang.envs.wordle.makers.human_files import read_games, write_games
from torchrl_lang.envs.wordle.makers.replayed import rows_of_turns
from torchrl_lang.envs.wordle.makers.tweets import TweetGames
from torchrl_lang.envs.wordle.rules import SOLVED, Rules, check_rules, colours_of_codes, feedback_table
from torchrl_lang.envs.wordle.words import TURN_LENGTH, WordIndex, WordList, load_words, wordle_tokenizer

__all__ = ["HumanGames"]

_ROW_LENGTH = 2 + TRIES * TURN_LENGTH
_NONE = -1
"""Code of places after the last guess of a game."""
_CODES = 256
"""Numbers of colourings, with that of guesses that are not drawn."""
_DRAWS = 200
"""Draws for every row after which drawing fails if none has succeeded."""


class HumanGames(GameMaker):
    """Rows with the colours of people's games, and guesses drawn uniformly from those that get these colours.

    For each row a game is drawn, and its hidden word: any word of the list (or, with ``true_word``, the answer of the
    puzzle). Each guess is drawn independently from the guesses that get the game's colours for this word. If there is
    none for one of them, another game and word are drawn, as in the ILQL paper's code (arXiv 2206.11871). So guesses
    need not agree with earlier colours of their game. Games that can never be drawn are counted in :meth:`impossible`.

    Args:
        games: for each game its answer and the codes of its guesses (see
            :func:`~torchrl_lang.envs.wordle.feedback_code`), as :func:`~torchrl_lang.envs.wordle.read_tweets` reads
            them.
        words: the words that may be hidden, a list or a path.
        guesses: the words that may be guessed, a list or a path; hidden words always may. Default ``words``.
        rules: the rules of the colours. Tweets follow ``"official"``; under ``"ilql"`` some cannot be refit.
        true_word: hide the puzzle's answer.
        table: the code of each guess for each hidden word, uint8 ``[words, guesses]``, 255 for guesses not to be drawn;
            by default computed for all.

    Raises:
        ValueError: there is no game, a code is out of range, or an option is unknown.

    Examples:
        >>> from torchrl_lang.envs.wordle import HumanGames, demo_words
        >>> human = HumanGames([("panic", [29, 242])], demo_words(200))
        >>> rows = human(range(2), seed=0)
        >>> human.tokenizer.decode(rows["tokens"][0][rows["attention_mask"][0]])
        '<a>...</a><b><y><b><b><g></s>...</a><g><g><g><g><g></s></eod>'
    """

    def __init__(
        self,
        games: TweetGames | Iterable[tuple[str, Sequence[int]]],
        words: WordList,
        *,
        guesses: WordList | None = None,
        rules: Rules = "official",
        true_word: bool = False,
        table: Tensor | None = None,
    ) -> None:
        check_rules(rules)
        super().__init__(wordle_tokenizer(), _ROW_LENGTH)
        self.words, self.rules, self.true_word = load_words(words), rules, true_word
        self.guesses = [] if guesses is None else load_words(guesses)
        if table is None:
            self.guesses = [*dict.fromkeys([*self.words, *self.guesses])]
            table = feedback_table(WordIndex(self.guesses).letters, WordIndex(self.words).letters, rules).T
        if table.shape != (len(self.words), len(self.guesses)) or table.dtype != torch.uint8:
            size = [len(self.words), len(self.guesses)]
            raise ValueError(f"table must be uint8 of shape {size}, got {table.dtype} {list(table.shape)}.")
        played = games.games if isinstance(games, TweetGames) else games
        self.games = [(answer, list(codes)) for answer, codes in played]
        self._table = table
        self._check_games()
        place = {word: index for index, word in enumerate(self.words)}
        self._answer = torch.tensor([place.get(answer, _NONE) for answer, _ in self.games])
        self._count = torch.tensor([len(codes) for _, codes in self.games])
        self._codes = torch.tensor([[*codes, *[_NONE] * (TRIES - len(codes))] for _, codes in self.games])
        # The guesses of each word by their code, and where each code begins.
        self._order = table.to(torch.int16).sort(dim=-1, stable=True).indices.to(torch.int32)
        number = torch.arange(len(table))[:, None] * _CODES + table.long()
        self._number = torch.bincount(number.flatten(), minlength=_CODES * len(table)).view(-1, _CODES)
        self._start = self._number.cumsum(-1) - self._number
        self._letters = WordIndex(self.guesses).letters

    def _check_games(self) -> None:
        if not self.games:
            raise ValueError("There are no games: see the reasons in read_tweets(...).report().")
        for answer, codes in self.games:
            if not 1 <= len(codes) <= TRIES or min(codes) < 0 or max(codes) > SOLVED:
                raise ValueError(f"A game has 1 to {TRIES} codes from 0 to {SOLVED}, got {codes} for {answer!r}.")

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, rules: Rules | None = None, true_word: bool = False) -> HumanGames:
        """Read a JSON file that :meth:`write` or the ILQL paper's code wrote.

        Args:
            path: the file: ``{"games": [[answer, [colours, ...]], ...], "transitions": {word: {colours: [guess,
                ...]}}}`` with colours such as ``<b><y><b><b><g>``. The words of the transitions may be hidden.
            rules: the rules of the colours; by default found from the transitions.
            true_word: see :class:`HumanGames`.

        Raises:
            FileError: the file holds something else, or colours that the rules do not give.
        """
        games, words, guesses, table, rules = read_games(Path(path), rules)
        return cls(games, words, guesses=guesses, rules=rules, true_word=true_word, table=table)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write games and transitions as JSON, in the form of the ILQL paper's code, with the rules beside them.

        The file lists every guess once for each hidden word: with 2,300 words and 13,000 guesses it takes 300 MB.
        """
        write_games(Path(path), self.games, self.words, self.guesses, self._table, self.rules)

    def select(self, numbers: Iterable[int]) -> HumanGames:
        """Some of the games, by their numbers, for instance those of a file with a split."""
        chosen = list(numbers)
        bad = [number for number in chosen if not 0 <= number < len(self.games)]
        if bad:
            raise ValueError(f"There are {len(self.games)} games, numbered from 0, got {bad[0]}.")
        some, index = copy.copy(self), torch.tensor(chosen, dtype=torch.int64)
        some.games = [self.games[number] for number in chosen]
        some._check_games()
        some._answer, some._count, some._codes = self._answer[index], self._count[index], self._codes[index]
        return some

    def split(self, fraction: float, *, seed: int = 0) -> tuple[HumanGames, HumanGames]:
        """A random ``fraction`` of the games, and the others."""
        order = np.random.default_rng(seed).permutation(len(self.games)).tolist()
        size = round(fraction * len(order))
        if not 0 < size < len(order):
            raise ValueError(f"fraction={fraction} of {len(order)} games leaves one side of the split without games.")
        return self.select(sorted(order[:size])), self.select(sorted(order[size:]))

    def best(self, fraction: float) -> HumanGames:
        """The ``fraction`` of the games, rounded down: solved ones first, then by fewest guesses, then the earlier.

        Raises:
            ValueError: the fraction is not above 0 and at most 1, or leaves no game.

        Examples:
            >>> from torchrl_lang.envs.wordle import HumanGames, demo_words
            >>> given_up, solved = ("panic", [29]), ("panic", [29, 242])
            >>> HumanGames([given_up, solved], demo_words(200)).best(0.5).games
            [('panic', [29, 242])]
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}.")
        size = int(len(self.games) * fraction)
        if not size:
            raise ValueError(f"fraction={fraction} of {len(self.games)} games is less than one game: give more.")
        lost = [codes[-1] != SOLVED for _, codes in self.games]
        order = sorted(range(len(lost)), key=lambda game: (lost[game], len(self.games[game][1])))
        return self.select(sorted(order[:size]))

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """Rows ``[N]`` of ``len(numbers)`` games drawn with replacement, see :meth:`GameMaker.__call__`."""
        random = torch.Generator().manual_seed(seed_of_games(seed, numbers))
        n = len(numbers)
        game = torch.zeros(n, dtype=torch.int64)
        word, missing = torch.zeros_like(game), torch.arange(n)
        for draw in count(1):
            game[missing] = torch.randint(len(self.games), (len(missing),), generator=random)
            word[missing] = torch.randint(len(self.words), (len(missing),), generator=random)
            if self.true_word:
                word[missing] = self._answer[game[missing]]
            missing = missing[~self._fits(game[missing], word[missing])]
            if not len(missing):
                break
            if draw >= _DRAWS and len(missing) == n:
                raise ValueError(
                    f"{draw * n} draws of a game and a hidden word found no guesses with the game's colours; "
                    f"{self.impossible()} of {len(self.games)} games have none at all. Give more guesses or words, or "
                    "other rules."
                )
        codes = self._codes[game].clamp_min(0)
        number, start = self._number[word[:, None], codes], self._start[word[:, None], codes]
        rank = (torch.rand((n, TRIES), generator=random, dtype=torch.float64) * number).long()
        guess = self._order[word[:, None], (start + rank).clamp_max(len(self.guesses) - 1)].long()
        turns = self._count[game]
        played = (torch.arange(TRIES) < turns[:, None])[..., None]
        return rows_of_turns(torch.where(played, self._letters[guess], 0), colours_of_codes()[codes], turns)

    def _fits(self, game: Tensor, word: Tensor) -> Tensor:
        """Whether each game has guesses for each of its colours with this hidden word, bool ``[N]``."""
        codes = self._codes[game]
        number = self._number[word.clamp_min(0)[:, None], codes.clamp_min(0)]
        return ((number > 0) | (codes == _NONE)).all(-1) & (word >= 0)

    def impossible(self) -> int:
        """Number of games that can never be drawn: with no hidden word (or not with the true one) they can be refit."""
        if self.true_word:
            return int((~self._fits(torch.arange(len(self.games)), self._answer)).sum())
        every, number = self._codes.unique(dim=0, return_counts=True)
        lost = 0
        for codes, times in zip(every.split(64), number.split(64), strict=True):
            guesses = self._number[:, codes.clamp_min(0)]  # [W, 64, 6]
            can = ((guesses > 0) | (codes == _NONE)).all(-1).any(0)
            lost += int(times[~can].sum())
        return lost

    def notes(self) -> dict[str, Any]:
        """See :meth:`~torchrl_lang.data.GameMaker.notes`; the digest changes with any game, guess or colouring."""
        table = hashlib.sha256(self._table.numpy().tobytes()).hexdigest()
        digest = json_digest({"games": self.games, "guesses": self.guesses, "table": table})
        task = {"task": "wordle", "words": self.words, "rules": self.rules}
        options = {"true_word": self.true_word, "human_games": len(self.games), "guesses": len(self.guesses)}
        return {**task, **super().notes(), **options, "human_digest": digest}
