"""Reddit comments with their parents and scores: reading their files, choosing and splitting them, and their rows."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast

from tensordict import TensorDict
from torch import Tensor

from torchrl_lang._checks import Unit, checked
from torchrl_lang._files import CSVRecord, FileError, read_csv_records, read_json_list, shorten
from torchrl_lang.data.generate import EpisodeSampler
from torchrl_lang.envs.reddit.rewards import TextReward, rewards_of
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.rows import encode_episode, to_rows
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["CommentRow", "CommentRows", "ReadReport", "RedditComments"]

FILES = ("comments_positive.csv", "comments_negative.csv")
"""The names of the two files, in the order in which their rows are counted."""

COMMENT, SCORE, PARENT = 4, 5, 10
"""Columns, counted from 0; the names in the header do not matter, but that of the score is no number."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_COLUMNS = f"give a header and rows with the comment in column {COMMENT}, its score in {SCORE}, its parent in {PARENT}"
_INDICES = "give JSON lists of different rows, counted from 0 through both CSV files without their headers"
_BAD_ROWS = "fix them, or leave them out with on_bad_rows='report'"
_SHOWN = 5
_ROUNDING = 1e-9
"""Of a quantile times a number: .07 * 100 is above 7 in floating point."""


class CommentRow(NamedTuple):
    """A comment and where it stands, or the reason why its row is malformed."""

    row: int
    """Counted from 0 through both files, without headers and with malformed rows, as index files count."""
    place: str
    """File and first line, such as ``comments_positive.csv line 2``."""
    parent: str = ""
    text: str = ""
    score: int = 0
    error: str = ""
    """Empty for a well-formed row."""


class ReadReport(NamedTuple):
    """The number of well-formed rows, and all malformed ones."""

    rows: int
    bad: tuple[CommentRow, ...] = ()

    def __str__(self) -> str:
        shown = "; ".join(f"{each.place} {each.error}" for each in self.bad[:_SHOWN])
        verb, more = "is" if len(self.bad) == 1 else "are", "; ..." if len(self.bad) > _SHOWN else ""
        return f"{self.rows} rows were read, {len(self.bad)} {verb} malformed: {shown}{more}"


def _read_rows(folder: str | Path, encoding: str) -> Iterator[CommentRow]:
    """The rows of both files; one is malformed if its record is, its comment is empty or its score no integer."""
    row = 0
    for file in FILES:
        records = read_csv_records(Path(folder) / file, encoding=encoding)
        header = next(records, CSVRecord(1, (), "is empty"))
        if header.error or len(header.fields) <= PARENT or not any(map(str.isalpha, header.fields[SCORE])):
            problem = f"has no header, but {header.error or shorten(header.fields)}"
            raise FileError(Path(folder) / file, problem, _COLUMNS)
        for record in records:
            place = f"{file} line {record.line}"
            text, score, parent = ("",) * 3 if record.error else (record.fields[i] for i in (COMMENT, SCORE, PARENT))
            if record.error or not text.strip():
                yield CommentRow(row, place, error=record.error or "has an empty comment")
            elif not _INTEGER.fullmatch(score.strip()):
                yield CommentRow(row, place, error=f"has {shorten(score)} as score, expected an integer")
            else:
                yield CommentRow(row, place, parent, text, int(score))
            row += 1


@dataclass(frozen=True)
class RedditComments:
    """Comments, the texts that they reply to, and their scores; item ``i`` of each belongs to comment ``i``.

    Args:
        parents: the texts that the comments reply to.
        comments: the comments.
        scores: upvotes minus downvotes.
        places: file and first line of each, such as ``comments_positive.csv line 2``; empty unless they were read.
        report: the number of rows that were read, and the malformed ones.

    Raises:
        ValueError: the numbers of items differ.

    Examples:
        >>> from torchrl_lang.envs.reddit import RedditComments
        >>> data = RedditComments(["my tomatoes are ripe"] * 2, ["well done", "so what"], [12, -3])
        >>> data.with_scores(at_least=1).comments
        ('well done',)
        >>> [turn.text for turn in data.episodes([1.0, -1.0])[0].turns]
        ['my tomatoes are ripe', 'well done']
    """

    parents: Sequence[str]
    comments: Sequence[str]
    scores: Sequence[int]
    places: Sequence[str] = ()
    report: ReadReport | None = None

    def __post_init__(self) -> None:
        for name in ("parents", "comments", "scores", "places"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = [len(each) for each in (self.parents, self.comments, self.scores, self.places)]
        if len({*sizes[:3]}) > 1 or sizes[3] not in (0, sizes[0]):
            raise ValueError(f"Each comment needs a parent and a score, and all or none a place, got {sizes} of them.")

    @classmethod
    def read(cls, folder: str | Path, indices: str | Path | None = None, **options: Any) -> RedditComments:
        """Read ``comments_positive.csv``, then ``comments_negative.csv``.

        The ILQL paper's code reads the same columns: the comment from column 4 (counted from 0), its score, an integer,
        from column 5, and the text that it replies to from column 10.

        Args:
            folder: has the two files.
            indices: an index file, such as ``train_idxs.json``: the rows to keep, in its order. Malformed rows count.
            **options: of :meth:`read_parts`.

        Raises:
            FileError: as there.
        """
        return cls.read_parts(folder, [indices], **options)[0]

    @classmethod
    @checked
    def read_parts(
        cls,
        folder: str | Path,
        indices: Sequence[str | Path | None],
        *,
        encoding: str = "utf-8",
        on_bad_rows: Literal["raise", "report"] = "raise",
    ) -> list[RedditComments]:
        """As :meth:`read` for each of several index files without common rows; the CSV files are read once.

        Args:
            folder: has the two files.
            indices: index files; None for all rows.
            encoding: "utf-8", with or without a byte order mark, or another one, such as "latin-1".
            on_bad_rows: "raise" lists the first malformed rows in an error; "report" leaves them out, warns, and lists
                all of them, with line numbers and reasons, in :attr:`report`.

        Raises:
            FileError: a file is missing, cannot be read or is damaged, there are malformed rows and ``on_bad_rows`` is
                "raise", an index file does not fit, or a row is in two of them.

        Examples:
            >>> import tempfile
            >>> from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
            >>> with tempfile.TemporaryDirectory() as home:
            ...     generate_reddit_comments(home, pairs=100)
            ...     files = [f"{home}/{name}_idxs.json" for name in ("train", "test")]
            ...     [len(part) for part in RedditComments.read_parts(home, files)]
            [80, 10]
        """
        wanted = [None if file is None else read_json_list(file, remedy=_INDICES) for file in indices]
        every, file_of = [*_read_rows(folder, encoding)], dict[int, str]()
        for file, numbers in zip(map(str, indices), wanted, strict=True):
            for number in numbers or ():
                if type(number) is not int or not 0 <= number < len(every) or number in file_of:
                    first = file_of.get(number) if isinstance(number, int) else None
                    other = f", which {Path(first).name} has, too" if first else ""
                    problem = f"has the row {shorten(number)}{other}; the files of {folder} have {len(every)} rows"
                    raise FileError(file, problem, _INDICES)
                file_of[number] = file
        bad = tuple(row for row in every if row.error)
        report = ReadReport(len(every) - len(bad), bad)
        if bad and on_bad_rows == "report":
            warnings.warn(f"{folder}: {report}.", stacklevel=3)
        if bad and on_bad_rows == "raise":
            raise FileError(folder, f"has malformed rows ({report})", _BAD_ROWS)
        parts = []
        for numbers in wanted:
            chosen = every if numbers is None else [every[number] for number in numbers]
            good = [row for row in chosen if not row.error]
            names = ("parent", "text", "score", "place")
            parents, comments, scores, places = ([getattr(row, name) for row in good] for name in names)
            parts.append(cls(parents, comments, scores, places, report))
        return parts

    def __len__(self) -> int:
        """Number of comments."""
        return len(self.comments)

    def take(self, numbers: Iterable[int]) -> RedditComments:
        """The comments with these numbers, in this order."""
        numbers = list(numbers)
        given = {name: getattr(self, name) for name in ("parents", "comments", "scores", "places")}
        columns: Any = {name: [each[i] for i in numbers] if each else () for name, each in given.items()}
        return RedditComments(**columns, report=self.report)

    @checked
    def with_scores(self, *, at_least: float | None = None, quantile: Unit | None = None) -> RedditComments:
        """The comments with a score, upvotes minus downvotes, of at least a cutoff.

        The ILQL paper chooses comments by their rewards instead: ``CommentRows(cutoff=)``.

        Args:
            at_least: the cutoff.
            quantile: the cutoff is number ``ceil(quantile * (N - 1))``, counted from 0, of the N scores in ascending
                order: 0.9 keeps the best tenth, and others whose score equals the cutoff.

        Raises:
            ValueError: not exactly one is given, or no comment has such a score.
        """
        if (quantile is None) == (at_least is None):
            raise ValueError(f"Give either at_least or quantile, got at_least={at_least} and quantile={quantile}.")
        if quantile is not None:
            at_least = sorted(self.scores)[math.ceil(quantile * (len(self) - 1) - _ROUNDING)] if self.scores else 0
        kept = [i for i, score in enumerate(self.scores) if score >= cast(float, at_least)]
        if not kept:
            best = max(self.scores, default=None)
            raise ValueError(f"None of {len(self)} comments has a score of at least {at_least:g}; the best is {best}.")
        return self.take(kept)

    @checked
    def split(self, fraction: Annotated[float, "(0, 1)"], *, seed: int = 0) -> tuple[RedditComments, RedditComments]:
        """Split off a fraction of the comments to test on; comments with the same text stay together.

        A hash of the seed and the text decides, so a comment falls on the same side in every dataset.

        Args:
            fraction: expected fraction of the second part, between 0 and 1.
            seed: of the hash.

        Returns:
            The rest, and the part that was split off.
        """
        sides: tuple[list[int], list[int]] = [], []
        for number, text in enumerate(self.comments):
            digest = hashlib.sha256(f"{seed} {text}".encode("utf-8", "surrogatepass")).digest()
            sides[int.from_bytes(digest[:7]) / 2.0**56 < fraction].append(number)
        return self.take(sides[0]), self.take(sides[1])

    def episodes(
        self,
        reward: Sequence[float] | Tensor | TextReward,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        include_parent: bool = True,
    ) -> list[Episode]:
        """An episode of one step for each comment: the environment writes the parent, the agent the comment.

        Args:
            reward: one number for each comment, or a function of the comments' texts.
            scale: the reward of an episode is ``scale * reward + shift``.
            shift: see ``scale``.
            include_parent: without it, and where the parent is empty, the agent has the first turn.

        Raises:
            ValueError: there is another number of rewards, or one is not finite.
        """
        given: Callable[[list[str]], object] = reward if callable(reward) else lambda texts: reward
        values = rewards_of(given, self.comments, scale=scale, shift=shift)
        return [
            Episode([*([Turn(parent)] if include_parent and parent else []), Turn(comment, value)], terminated=True)
            for parent, comment, value in zip(self.parents, self.comments, values.tolist(), strict=True)
        ]


class CommentRows(EpisodeSampler):
    """Makes the rows of comments, one step each: the environment writes the parent, the agent the comment.

    Game ``i`` is comment ``i``, whatever the seed. All rewards are computed in one call, so those of a noised reward do
    not depend on the parts in which the rows are written.

    Args:
        data: the comments.
        reward: of their texts.
        tokenizer: the tokenizer of the rows.
        row_length: ``T``.
        scale: the reward of a row is ``scale * reward + shift``.
        shift: see ``scale``.
        include_parent: begin the rows with the parents.
        cutoff: leave out comments whose reward, scaled and shifted, is below this, as ``cuttoff`` does in the ILQL
            paper's code (arXiv 2206.11871); by default none. Numbers of games count those that are left.

    Raises:
        ValueError: the reward does not return one finite number for each text, or none reaches the cutoff; on calls, a
            comment does not fit a row or cannot be encoded; the message names its file and line.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.envs.reddit import RedditComments
        >>> from torchrl_lang.envs.reddit.data import CommentRows
        >>> data = RedditComments(["a", "b"], ["ab", "b"], [1, 1])
        >>> tokenizer = CharTokenizer.from_alphabet("ab")
        >>> rows = CommentRows(data, lambda texts: [float(len(text)) for text in texts], tokenizer, 9)(range(2), seed=0)
        >>> rows["token_reward"].sum(-1)
        tensor([2., 1.])
        >>> CommentRows(data, lambda texts: [1.0, 2.0], tokenizer, 9, scale=-5.0, cutoff=-5.0).data.comments
        ('ab',)
    """

    def __init__(
        self,
        data: RedditComments,
        reward: TextReward,
        tokenizer: Tokenizer,
        row_length: int,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        include_parent: bool = True,
        cutoff: float | None = None,
    ) -> None:
        super().__init__(tokenizer, row_length)
        self.data, self.include_parent = data, include_parent
        self.rewards: Tensor = rewards_of(reward, data.comments, scale=scale, shift=shift)
        if cutoff is not None:
            kept = (self.rewards >= cutoff).nonzero().flatten()
            if not len(kept):
                best = f"; the best is {float(self.rewards.max()):g}" if len(data) else ""
                raise ValueError(f"None of {len(data)} comments has a reward of at least cutoff={cutoff:g}{best}.")
            self.data, self.rewards = data.take(kept.tolist()), self.rewards[kept]

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See ``EpisodeSampler.__call__``."""
        rewards = self.rewards[list(numbers)]
        episodes = self.data.take(numbers).episodes(rewards, include_parent=self.include_parent)
        try:
            return to_rows(episodes, self.tokenizer, self.row_length)
        except ValueError as error:
            raise self._unreadable(numbers, episodes) or error from error

    def _unreadable(self, numbers: Sequence[int], episodes: Sequence[Episode]) -> ValueError | None:
        """Describe the first comment that cannot be encoded, and where it stands."""
        for number, episode in zip(numbers, episodes, strict=True):
            try:
                encode_episode(episode, self.tokenizer)
            except ValueError as error:
                place = self.data.places[number] if self.data.places else f"comment {number}"
                return ValueError(f"{place} cannot be encoded: {error}")
        return None
