"""Read the squares of tweeted Wordle games."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeGuard

from tqdm import tqdm

from torchrl_lang._checks import one_of
from torchrl_lang._files import CSVFault, CSVRecord, FileError, read_csv_records, read_text, shorten
from torchrl_lang.envs.wordle.colour_text import code_of, tile_colours
from torchrl_lang.envs.wordle.makers.continuing import TRIES
from torchrl_lang.envs.wordle.rules import SOLVED
from torchrl_lang.envs.wordle.words import WORD_LENGTH, load_words

__all__ = ["PUZZLES", "TweetGames", "example_tweets", "load_answers", "read_tweets"]

_ANSWERS = """
panic solar shire proxy point robot prick wince crimp knoll sugar whack mount perky could wrung light those moist shard
pleat aloft skill elder frame humor pause ulcer ultra robin cynic aroma caulk shake dodge swill tacit other thorn trove
"""

PUZZLES: Mapping[int, str] = dict(enumerate(_ANSWERS.split(), start=210))
"""Answers of the newspaper's puzzles 210 to 249, which the ILQL paper's data has."""

_EXAMPLES = 3
"""Number of tweets that a report names for each reason."""
_SCORE = re.compile(r"(?<![\d/])([1-6Xx])/6(?![\d/])")
"""The score before the tiles, such as ``3/6``, or ``X/6`` for a lost game; not a part of a date."""
_REMEDY = "give a CSV file in UTF-8 with the puzzle's number first and the tweet's text last"


@dataclass
class TweetGames:
    """Games read from tweets, and why other tweets were left out; see :func:`read_tweets`.

    Examples:
        >>> from torchrl_lang.envs.wordle import TweetGames
        >>> tweets = TweetGames()
        >>> tweets.add(1, ("panic", [29, 242]))
        >>> tweets.add(5, "unfinished")
        >>> print(tweets.report())
        1 games, 1 tweets left out
        1: unfinished (line 5)
    """

    games: list[tuple[str, list[int]]] = field(default_factory=list)
    """For each game the answer, and a code for the five colours of each guess (see :func:`feedback_code`)."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of tweets left out, by reason."""
    examples: dict[str, list[int]] = field(default_factory=dict)
    """For each reason the lines of the file where its first tweets begin, counted from one."""

    def add(self, line: int, game: tuple[str, list[int]] | str) -> None:
        """Add a game, or the reason for which the tweet that begins in this line is left out."""
        if not isinstance(game, str):
            self.games.append(game)
            return
        self.left_out[game] = self.left_out.get(game, 0) + 1
        if self.left_out[game] <= _EXAMPLES:
            self.examples.setdefault(game, []).append(line)

    def report(self) -> str:
        """What was read and left out, a line for each reason, the most frequent first."""
        lines = [f"{len(self.games)} games, {sum(self.left_out.values())} tweets left out"]
        for reason, count in sorted(self.left_out.items(), key=lambda pair: (-pair[1], pair[0])):
            places = ", ".join(map(str, self.examples[reason]))
            lines.append(f"{count}: {reason} (line {places}{', ...' if count > _EXAMPLES else ''})")
        return "\n".join(lines)


def example_tweets() -> Path:
    """The path of a small shipped file for :func:`read_tweets`, of made-up tweets.

    Examples:
        >>> from torchrl_lang.envs.wordle import example_tweets, read_tweets
        >>> len(read_tweets(example_tweets()).games)
        48
    """
    return Path(__file__).with_name("example_tweets.csv")


def load_answers(path: str | os.PathLike[str]) -> dict[int, str]:
    r"""Read answers of puzzles from a text file: a number and a word on each line, separated by white space or a comma.

    Raises:
        FileError: a line is something else, or a number is repeated.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.envs.wordle import load_answers
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "answers.txt"
        ...     _ = path.write_text("250 tease\n251,cloth\n")
        ...     load_answers(path)
        {250: 'tease', 251: 'cloth'}
    """
    remedy = "give a puzzle's number and its answer on each line"
    answers: dict[int, str] = {}
    for number, line in enumerate(read_text(Path(path), remedy=remedy).splitlines(), start=1):
        parts = line.replace(",", " ").split()
        if not parts:
            continue
        if len(parts) != 2 or not _is_number(parts[0]):
            raise FileError(Path(path), f"has {shorten(line)} on line {number}", remedy)
        if int(parts[0]) in answers:
            raise FileError(Path(path), f"has the puzzle {parts[0]} again on line {number}", "remove one of them")
        answers[int(parts[0])] = parts[1]
    load_words(list(dict.fromkeys(answers.values())))
    return answers


def read_tweets(
    path: str | os.PathLike[str],
    *,
    answers: Mapping[int, str] | str | os.PathLike[str] = PUZZLES,
    unfinished: Literal["drop", "keep"] = "drop",
    progress: bool = False,
) -> TweetGames:
    r"""Read tweeted games from a CSV file: the puzzle's number is the first column, the tweet's text the last.

    A game is 1 to 6 consecutive lines of five tiles, of the dark, the light or the high-contrast theme. No tweet is
    dropped silently: the result counts those that are left out, by reason, with the lines of the first ones. A quote
    that is never closed costs its own tweet, not those that follow. Left out are records whose quotes do not match or
    that hold a NUL byte, empty lines, tweets without a grid, with lines of more or fewer than five tiles, with several
    grids, of more than six guesses, with guesses after the solution, unfinished ones, those whose rows do not match the
    score before them (``3/6``), those without text or puzzle number, and those of puzzles without an answer. A first
    record without a number is a header.

    Args:
        path: the file.
        answers: the answers by puzzle number, as a mapping or a file for :func:`load_answers`; default
            :data:`PUZZLES`.
        unfinished: ``"keep"`` keeps games of fewer than six guesses without the solution, as the paper's code does.
        progress: show a progress bar.

    Returns:
        The :class:`TweetGames`.

    Raises:
        FileError: the file cannot be read, or is not UTF-8.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.envs.wordle import read_tweets
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "tweets.csv"
        ...     _ = path.write_text('210,"2/6\n\n⬜🟨⬜⬜🟩\n🟩🟩🟩🟩🟩"\n210,no luck today', encoding="utf-8")
        ...     tweets = read_tweets(path)
        >>> tweets.games
        [('panic', [29, 242])]
        >>> tweets.left_out
        {'no line of tiles': 1}
    """
    one_of("unfinished", unfinished, ("drop", "keep"))
    table = answers if isinstance(answers, Mapping) else load_answers(answers)
    path, tweets = Path(path), TweetGames()
    for record in tqdm(_records(path), unit="tweet", disable=not progress):
        if record.fault is not None:
            tweets.add(record.line, str(record.fault))
        elif record.line > 1 or _is_number(record.fields[0].strip()):  # otherwise a header
            tweets.add(record.line, _game(record.fields, table, keep_unfinished=unfinished == "keep"))
    return tweets


def _records(path: Path) -> Iterator[CSVRecord]:
    """The records of a CSV file in UTF-8, read one by one, because such files are large."""
    for record in read_csv_records(path, is_row=_is_row, ragged=True):
        if record.fault is CSVFault.ENCODING:
            raise FileError(path, f"{record.error} in the record of line {record.line}", _REMEDY)
        yield record


def _is_row(fields: Sequence[str]) -> bool:
    return len(fields) > 1 and _is_number(fields[0].strip())


def _game(record: Sequence[str], answers: Mapping[int, str], *, keep_unfinished: bool) -> tuple[str, list[int]] | str:
    """The answer and the codes of the guesses of a tweet, or why there are none."""
    if len(record) < 2:
        return "fewer than two columns"
    if not _is_number(record[0].strip()):
        return "no puzzle number"
    codes = grid(record[-1].splitlines(), keep_unfinished=keep_unfinished)
    if isinstance(codes, str):
        return codes
    answer = answers.get(int(record[0]))
    return "puzzle without a known answer" if answer is None else (answer, codes)


def grid(lines: Sequence[str], *, keep_unfinished: bool = False) -> list[int] | str:
    """The codes of the guesses in the lines of a tweet, or the reason why they are not those of one game."""
    blocks: list[list[list[int]]] = []
    before = False
    for line in lines:
        colours = tile_colours(line)
        if colours is not None and not before:
            blocks.append([])
        if colours is not None:
            blocks[-1].append(colours)
        before = colours is not None
    if not blocks:
        return "no line of tiles"
    if any(len(colours) != WORD_LENGTH for block in blocks for colours in block):
        return "a line of more or fewer than five tiles"
    if len(blocks) > 1:
        return "several grids"
    codes = [code_of(colours) for colours in blocks[0]]
    if len(codes) > TRIES:
        return "more than six guesses"
    if SOLVED in codes[:-1]:
        return "guesses after the solution"
    if codes[-1] != SOLVED and len(codes) < TRIES and not keep_unfinished:
        return "unfinished"
    score = _score(lines)
    if score is not None and not _matches(score, codes):
        return "rows that do not match the score"
    return codes


def _score(lines: Sequence[str]) -> str | None:
    """The last score in the lines before the first tiles."""
    first = next(place for place, line in enumerate(lines) if tile_colours(line) is not None)
    found = _SCORE.findall("\n".join(lines[:first]))
    return found[-1] if found else None


def _matches(score: str, codes: list[int]) -> bool:
    """Whether a game has the score ``1`` to ``6``, its guesses with the solution, or ``X`` without it."""
    solved = codes[-1] == SOLVED
    return len(codes) == TRIES and not solved if score in "Xx" else solved and len(codes) == int(score)


def _is_number(text: object) -> TypeGuard[str]:
    return isinstance(text, str) and re.fullmatch(r"[0-9]{1,9}", text) is not None
