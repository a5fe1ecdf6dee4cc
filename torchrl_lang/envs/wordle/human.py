"""Games of people: read from tweets, of which only the colours are known, and made into rows with such colours."""

from __future__ import annotations

import copy
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._checks import checked
from torchrl_lang._files import FileError, Record, file_errors, json_digest, read_csv_records, read_text
from torchrl_lang.data.generate import EpisodeSampler, seed_of_games
from torchrl_lang.envs.wordle.rules import (
    CODE_OF_LETTERS,
    CODE_OF_SYMBOLS,
    SOLVED,
    Rules,
    colours_of_codes,
    feedback_table,
    tile_colours,
)
from torchrl_lang.envs.wordle.transcript import rows_of_turns
from torchrl_lang.envs.wordle.words import (
    TRIES,
    TURN_LENGTH,
    WORD_LENGTH,
    WordIndex,
    WordList,
    load_words,
    wordle_tokenizer,
    words_and_guesses,
)

__all__ = ["PUZZLES", "HumanGames", "TweetGames", "example_tweets", "load_answers", "read_tweets"]

_ANSWERS = """
panic solar shire proxy point robot prick wince crimp knoll sugar whack mount perky could wrung light those moist shard
pleat aloft skill elder frame humor pause ulcer ultra robin cynic aroma caulk shake dodge swill tacit other thorn trove
"""
PUZZLES: Mapping[int, str] = dict(enumerate(_ANSWERS.split(), start=210))
"""Answers of the newspaper's puzzles 210 to 249, which the ILQL paper's data has."""

# -- tweets ------------------------------------------------------------------------------------------------------------

_NAMED = 3  # tweets that a report names for each reason
_SCORE = re.compile(r"(?<![\d/])([1-6Xx])/6(?![\d/])")  # such as 3/6, or X/6 for a lost game; not a part of a date
_NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")
_WORD = re.compile("[a-z]{5}")


class TweetGames(NamedTuple):
    """Games read from tweets, and why other tweets were left out; see :func:`read_tweets`."""

    games: list[tuple[str, list[int]]]
    """For each game the answer, and a code for the five colours of each guess (see :func:`feedback_code`)."""
    left_out: dict[str, list[int]]
    """The lines of the file where tweets that were left out begin, counted from one, by reason."""

    def report(self) -> str:
        """Numbers of games and of tweets left out, a line for each reason, the most frequent first."""
        lines = [f"{len(self.games)} games, {sum(map(len, self.left_out.values()))} tweets left out"]
        for reason, places in sorted(self.left_out.items(), key=lambda item: (-len(item[1]), item[0])):
            named = ", ".join(map(str, places[:_NAMED])) + ", ..." * (len(places) > _NAMED)
            lines.append(f"{len(places)}: {reason} (line {named})")
        return "\n".join(lines)


def example_tweets() -> Path:
    """The path of a small shipped file for :func:`read_tweets`, of made-up tweets."""
    return Path(__file__).with_name("example_tweets.csv")


def load_answers(path: str | Path) -> dict[int, str]:
    """Read answers of puzzles from a text file: a number and a word on each line, separated by white space or a comma.

    Raises:
        FileError: a line is something else, or a number is repeated.
    """
    remedy = "give a puzzle's number and its answer on each line, each number once"
    answers: dict[int, str] = {}
    for line, text in enumerate(read_text(Path(path), remedy=remedy).splitlines(), start=1):
        fields = text.replace(",", " ").split()
        if not fields:
            continue
        if len(fields) != 2 or not _is_number(fields[0]) or int(fields[0]) in answers or not _WORD.fullmatch(fields[1]):
            raise FileError(Path(path), f"has {text[:80]!r} on line {line}", remedy)
        answers[int(fields[0])] = fields[1]
    return answers


def read_tweets(path: str | Path, *, answers: Mapping[int, str] | str | Path = PUZZLES) -> TweetGames:
    r"""Read tweeted games from a CSV file: the puzzle's number is the first column, the tweet's text the last.

    A game is 1 to 6 consecutive lines of five tiles, of the dark, the light or the high-contrast theme. No tweet is
    dropped silently: the result counts those that are left out, by reason, with the lines of the first ones: broken
    records, tweets without a grid, with lines of more or fewer than five tiles, with several grids, of more than six
    guesses, with guesses after the solution, unfinished ones, those whose rows do not match the score before them
    (``3/6``), and those without text, puzzle number or known answer. A first record without a number is a header.

    Args:
        path: the file.
        answers: the answers by puzzle number, as a mapping or a file for :func:`load_answers`; default
            :data:`PUZZLES`.

    Returns:
        The :class:`TweetGames`.

    Raises:
        FileError: the file cannot be read.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.envs.wordle.human import read_tweets
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "tweets.csv"
        ...     _ = path.write_text('210,"2/6\n\n⬜🟨⬜⬜🟩\n🟩🟩🟩🟩🟩"\n210,no luck today', encoding="utf-8")
        ...     tweets = read_tweets(path)
        >>> tweets.games
        [('panic', [29, 242])]
        >>> print(tweets.report())
        1 games, 1 tweets left out
        1: no line of tiles (line 5)
    """
    table = answers if isinstance(answers, Mapping) else load_answers(answers)
    games, left_out = [], defaultdict[str, list[int]](list)
    for record in read_csv_records(Path(path), ragged=True):
        if record.line == 1 and not record.error and not _is_number(record.fields[0]):
            continue  # a header
        game = record.error.partition(" (")[0] if record.error else _game(record.fields, table)
        if isinstance(game, str):
            left_out[game].append(record.line)
        else:
            games.append(game)
    return TweetGames(games, dict(left_out))


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text) is not None


def _game(fields: Sequence[str], answers: Mapping[int, str]) -> tuple[str, list[int]] | str:
    """The answer and the codes of the guesses of a tweet, or why there are none."""
    if len(fields) < 2:
        return "fewer than two columns"
    if not _is_number(fields[0]):
        return "no puzzle number"
    codes = grid(fields[-1].splitlines())
    if isinstance(codes, str):
        return codes
    answer = answers.get(int(fields[0]))
    return "puzzle without a known answer" if answer is None else (answer, codes)


def grid(lines: Sequence[str]) -> list[int] | str:
    """The codes of the guesses in the lines of a tweet, or the reason why they are not those of one game."""
    colours = [tile_colours(line) for line in lines]
    blocks = [[row or "" for row in block] for tiles, block in groupby(colours, key=bool) if tiles]
    if not blocks:
        return "no line of tiles"
    if any(len(row) != WORD_LENGTH for block in blocks for row in block):
        return "a line of more or fewer than five tiles"
    if len(blocks) > 1:
        return "several grids"
    codes = [CODE_OF_LETTERS[row] for row in blocks[0]]
    solved = codes[-1] == SOLVED
    if len(codes) > TRIES:
        return "more than six guesses"
    if SOLVED in codes[:-1]:
        return "guesses after the solution"
    if not solved and len(codes) < TRIES:
        return "unfinished"
    scores = _SCORE.findall("\n".join(lines[: [row is not None for row in colours].index(True)]))
    if scores and scores[-1].upper() != (str(len(codes)) if solved else "X"):
        return "rows that do not match the score"
    return codes


# -- rows with the colours of people's games ---------------------------------------------------------------------------

_NONE = -1  # code of places after the last guess of a game
_NO_GUESS = 255  # code of guesses that are not drawn
_CODES = 256
_DRAWS = 200
"""Draws for every row after which drawing fails if none has succeeded."""


class HumanGames(EpisodeSampler):
    """Rows with the colours of people's games, and guesses drawn uniformly from those that get these colours.

    For each row a game is drawn, and its hidden word: any word of the list (or, with ``true_word``, the answer of the
    puzzle). Each guess is drawn independently from the guesses that get the game's colours for this word. If there is
    none for one of them, another game and word are drawn, as in the ILQL paper's code (arXiv 2206.11871). So guesses
    need not agree with earlier colours of their game. Games that can never be drawn are counted in :meth:`impossible`.

    Args:
        games: for each game its answer and the codes of its guesses (see
            :func:`~torchrl_lang.envs.wordle.rules.feedback_code`), as :func:`read_tweets` reads them.
        words: the words that may be hidden, a list or a path.
        guesses: the words that may be guessed, a list or a path; hidden words always may. Default ``words``.
        rules: the rules of the colours. Tweets follow ``"official"``; under ``"ilql"`` some cannot be refit.
        true_word: hide the puzzle's answer.

    Raises:
        ValueError: there is no game, a code is out of range, or an option is unknown.

    Examples:
        >>> from torchrl_lang.envs.wordle import demo_words
        >>> from torchrl_lang.envs.wordle.human import HumanGames
        >>> human = HumanGames([("panic", [29, 242]), ("panic", [29])], demo_words(200))
        >>> rows = human(range(2), seed=0)
        >>> human.tokenizer.decode(rows["tokens"][0][rows["attention_mask"][0]])
        '<a>...</a><b><y><b><b><g></s>...</a><g><g><g><g><g></s></eod>'
        >>> human.best(0.5).games
        [('panic', [29, 242])]
    """

    def __init__(
        self,
        games: TweetGames | Iterable[tuple[str, Sequence[int]]],
        words: WordList,
        *,
        guesses: WordList | None = None,
        rules: Rules = "official",
        true_word: bool = False,
    ) -> None:
        super().__init__(wordle_tokenizer(), 2 + TRIES * TURN_LENGTH)
        self.words, self.rules, self.true_word = load_words(words), rules, true_word
        every = words_and_guesses(self.words, guesses)
        self._draw_from(every, feedback_table(WordIndex(every).letters, WordIndex(self.words).letters, rules).T)
        self._set_games(games.games if isinstance(games, TweetGames) else games)

    def _draw_from(self, guesses: list[str], table: Tensor) -> None:
        """Draw these guesses, of which the codes for each word are uint8 ``[W, G]``, 255 for those not to be drawn."""
        self.guesses, self._table = guesses, table
        # The guesses of each word by their code, and where each code begins.
        self._order = table.to(torch.int16).sort(dim=-1, stable=True).indices.to(torch.int32)
        number = torch.arange(len(table))[:, None] * _CODES + table.long()
        self._number = torch.bincount(number.flatten(), minlength=_CODES * len(table)).view(-1, _CODES)
        self._start = self._number.cumsum(-1) - self._number
        self._letters = WordIndex(self.guesses).letters

    def _set_games(self, games: Iterable[tuple[str, Sequence[int]]]) -> None:
        self.games = [(answer, list(codes)) for answer, codes in games]
        wrong: list[Any] = [c for _, c in self.games if not 1 <= len(c) <= TRIES or min(c) < 0 or max(c) > SOLVED]
        wrong += [] if self.games else ["no games: see read_tweets(...).report()"]
        if wrong:
            raise ValueError(f"Games have 1 to {TRIES} codes from 0 to {SOLVED} each, got {wrong[0]}.")
        place = {word: index for index, word in enumerate(self.words)}
        self._answer = torch.tensor([place.get(answer, _NONE) for answer, _ in self.games])
        self._codes = torch.tensor([[*codes, *[_NONE] * (TRIES - len(codes))] for _, codes in self.games])

    @classmethod
    def read(cls, path: str | Path, *, true_word: bool = False) -> HumanGames:
        """Read a JSON file that the ILQL paper's code wrote.

        Args:
            path: the file: ``{"games": [[answer, [colours, ...]], ...], "transitions": {word: {colours: [guess,
                ...]}}}`` with colours such as ``<b><y><b><b><g>``. The words of the transitions may be hidden. Without
                an entry ``rules`` they are found from the transitions.
            true_word: see :class:`HumanGames`.

        Raises:
            FileError: the file holds something else, or colours that the rules do not give.
        """
        path = Path(path)
        text = read_text(path, remedy=_REMEDY)
        with file_errors(path, "holds something else", _REMEDY, ValueError):
            file = _File.model_validate_json(text)
            words = load_words(list(file.transitions))
            every = (guess for by_code in file.transitions.values() for some in by_code.values() for guess in some)
            guesses = load_words(list(dict.fromkeys(every)))
        place = {guess: index for index, guess in enumerate(guesses)}
        table = torch.full((len(words), len(guesses)), _NO_GUESS, dtype=torch.uint8)
        for row, by_colours in zip(table, file.transitions.values(), strict=True):
            for colours, some in by_colours.items():
                row[[place[guess] for guess in some]] = CODE_OF_SYMBOLS[colours]
        games = [(answer, [CODE_OF_SYMBOLS[colours] for colours in played]) for answer, played in file.games]
        for rules in get_args(Rules) if file.rules is None else (file.rules,):
            given = feedback_table(WordIndex(guesses).letters, WordIndex(words).letters, rules).T
            wrong = (table != _NO_GUESS) & (table != given)
            if not wrong.any():
                human = cls(games, words, rules=rules, true_word=true_word)
                human._draw_from(guesses, table)
                return human
        word, guess = wrong.nonzero()[0].tolist()
        pair = f"the guess {guesses[guess]!r} and the word {words[word]!r}"
        raise FileError(path, f"has colours of {pair} which the rules do not give", "make the file again")

    def select(self, numbers: Iterable[int]) -> HumanGames:
        """Some of the games, by their numbers, for instance those of a file with a split."""
        some = copy.copy(self)
        some._set_games([self.games[number] for number in numbers])
        return some

    def split(self, fraction: float, *, seed: int = 0) -> tuple[HumanGames, HumanGames]:
        """A random ``fraction`` of the games, and the others."""
        order = np.random.default_rng(seed).permutation(len(self.games)).tolist()
        size = round(fraction * len(order))
        return self.select(sorted(order[:size])), self.select(sorted(order[size:]))

    @checked
    def best(self, fraction: Annotated[float, "(0, 1]"]) -> HumanGames:
        """The ``fraction`` of the games, rounded down: solved ones first, then by fewest guesses, then the earlier."""
        effort = [(codes[-1] != SOLVED, len(codes)) for _, codes in self.games]
        order = sorted(range(len(effort)), key=effort.__getitem__)
        return self.select(sorted(order[: int(len(order) * fraction)]))

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """Rows ``[N]`` of ``len(numbers)`` games drawn with replacement, see ``EpisodeSampler.__call__``."""
        random = torch.Generator().manual_seed(seed_of_games(seed, numbers))
        n = len(numbers)
        game = torch.zeros(n, dtype=torch.int64)
        word, missing = torch.zeros_like(game), torch.arange(n)
        for draw in count(1):
            game[missing] = torch.randint(len(self.games), (len(missing),), generator=random)
            word[missing] = torch.randint(len(self.words), (len(missing),), generator=random)
            if self.true_word:
                word[missing] = self._answer[game[missing]]
            missing = missing[~self._fits(self._codes[game[missing]], word[missing])]
            if not len(missing):
                break
            if draw >= _DRAWS and len(missing) == n:
                none = f"{self.impossible()} of {len(self.games)} games have none at all"
                raise ValueError(f"{draw * n} draws found no guesses with a game's colours, {none}: give more words.")
        played = self._codes[game] != _NONE
        codes = self._codes[game].clamp_min(0)
        number, start = self._number[word[:, None], codes], self._start[word[:, None], codes]
        rank = (torch.rand((n, TRIES), generator=random, dtype=torch.float64) * number).long()
        guess = self._order[word[:, None], (start + rank).clamp_max(len(self.guesses) - 1)].long()
        letters = torch.where(played[..., None], self._letters[guess], 0)
        return rows_of_turns(letters, colours_of_codes()[codes], played.sum(-1))

    def _fits(self, codes: Tensor, word: Tensor) -> Tensor:
        """Whether there are guesses for all ``codes``, int64 ``[..., 6]``, of a game with a hidden word ``[...]``."""
        number = self._number[word.clamp_min(0)[..., None], codes.clamp_min(0)]
        return ((number > 0) | (codes == _NONE)).all(-1) & (word >= 0)

    def impossible(self) -> int:
        """Number of games that can never be drawn: with no hidden word (or not with the true one) they can be refit."""
        if self.true_word:
            return int((~self._fits(self._codes, self._answer)).sum())
        every, number = self._codes.unique(dim=0, return_counts=True)
        words = torch.arange(len(self.words))[:, None]
        can = torch.cat([self._fits(codes, words).any(0) for codes in every.split(64)])
        return int(number[~can].sum())

    def notes(self) -> dict[str, Any]:
        """See ``EpisodeSampler.notes``; the digest changes with any game, guess or colouring."""
        table = hashlib.sha256(self._table.numpy().tobytes()).hexdigest()
        digest = json_digest({"games": self.games, "guesses": self.guesses, "table": table})
        task = {"task": "wordle", "words": self.words, "rules": self.rules}
        options = {"true_word": self.true_word, "human_games": len(self.games), "guesses": len(self.guesses)}
        return {**task, **super().notes(), **options, "human_digest": digest}


# -- their file --------------------------------------------------------------------------------------------------------

_REMEDY = 'give {"games": [[answer, [colours, ...]], ...], "transitions": {word: {colours: [guess, ...]}}}'


Colours = Annotated[str, Field(pattern="^(<[byg]>){5}$")]


class _File(Record):
    """Games, and the guesses that get each colouring for each hidden word."""

    games: list[tuple[str, Annotated[list[Colours], Field(min_length=1, max_length=TRIES)]]]
    transitions: dict[str, dict[Colours, list[str]]]
    rules: Rules | None = None
