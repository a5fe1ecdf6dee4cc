"""Reddit comments with their parents and scores, and episodes of them."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from torchrl_lang._checks import finite, one_of, within
from torchrl_lang._files import FileError
from torchrl_lang.envs.reddit.files import (
    BadRow,
    CommentRow,
    ReadReport,
    read_comment_rows,
    read_row_indices,
)
from torchrl_lang.envs.reddit.text_reward import TextReward, rewards_of
from torchrl_lang.text.episodes import Episode, Turn

__all__ = ["RedditComments"]

_ROUNDING = 1e-9
"""Of a quantile times a number: .07 * 100 is above 7 in floating point."""
_BAD_ROWS = "fix them, or leave them out with on_bad_rows='report'"


@dataclass(frozen=True)
class RedditComments:
    """Comments, the texts that they reply to, and their scores; item ``i`` of each belongs to comment ``i``.

    Args:
        parents: the texts that the comments reply to.
        comments: the comments.
        scores: upvotes minus downvotes.
        files: names of the files that the comments were read from; empty for comments that were not read.
        lines: their first lines in these files, counted from 1; empty as ``files``.
        report: what reading found.

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
    files: Sequence[str] = ()
    lines: Sequence[int] = ()
    report: ReadReport | None = None

    def __post_init__(self) -> None:
        for name in ("parents", "comments", "scores", "files", "lines"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        counts = {name: len(getattr(self, name)) for name in ("parents", "comments", "scores", "files", "lines")}
        places = {counts.pop("files"), counts.pop("lines")}
        if len(set(counts.values())) > 1 or places not in ({0}, {len(self.comments)}):
            raise ValueError(f"Each comment needs a parent and a score, and either each or none a line, got {counts}.")

    @classmethod
    def read(
        cls,
        folder: str | Path,
        indices: str | Path | None = None,
        *,
        encoding: str = "utf-8",
        on_bad_rows: Literal["raise", "report"] = "raise",
    ) -> RedditComments:
        """Read ``comments_positive.csv``, then ``comments_negative.csv``; see :func:`read_comment_rows`.

        Args:
            folder: has the two files.
            indices: an index file, such as ``train_idxs.json``: the rows to keep, in its order. Malformed rows count.
            encoding: "utf-8", with or without a byte order mark, or another one, such as "latin-1".
            on_bad_rows: "raise" lists the first malformed rows in an error; "report" leaves them out, warns, and lists
                all of them, with line numbers and reasons, in :attr:`report`.

        Raises:
            FileError: a file is missing, cannot be read or is damaged, there are malformed rows and ``on_bad_rows`` is
                "raise", or the index file does not fit.
        """
        wanted = None if indices is None else read_row_indices(indices)
        found = _read(folder, None if wanted is None else set(wanted), encoding, on_bad_rows)
        return cls._part(folder, found, indices, wanted)

    @classmethod
    def read_parts(
        cls,
        folder: str | Path,
        indices: Sequence[str | Path],
        *,
        encoding: str = "utf-8",
        on_bad_rows: Literal["raise", "report"] = "raise",
    ) -> list[RedditComments]:
        """As :meth:`read` for each of several index files without common rows; the CSV files are read once.

        Raises:
            FileError: as in :meth:`read`, or a row is in two index files.

        Examples:
            >>> import tempfile
            >>> from torchrl_lang.envs.reddit import RedditComments, generate_reddit_comments
            >>> with tempfile.TemporaryDirectory() as home:
            ...     generate_reddit_comments(home, pairs=100)
            ...     files = [f"{home}/{name}_idxs.json" for name in ("train", "test")]
            ...     [len(part) for part in RedditComments.read_parts(home, files)]
            [80, 10]
        """
        wanted, file_of = [read_row_indices(file) for file in indices], dict[int, str | Path]()
        for file, rows in zip(indices, wanted, strict=True):
            for row in rows:
                if (other := file_of.setdefault(row, file)) != file:
                    problem = f"has the row {row}, which {Path(other).name} has, too"
                    raise FileError(file, problem, "give index files without common rows")
        found = _read(folder, set(file_of), encoding, on_bad_rows)
        return [cls._part(folder, found, *part) for part in zip(indices, wanted, strict=True)]

    @classmethod
    def _part(
        cls, folder: str | Path, found: _Found, indices: str | Path | None, wanted: list[int] | None
    ) -> RedditComments:
        """The ``wanted`` rows of the file ``indices``, without them all rows; warns of malformed ones."""
        missing = tuple[int, ...]()
        if indices is None or wanted is None:
            rows = list(found.good.values())
        else:
            if wanted and max(wanted) >= found.total:
                problem = f"has the row {max(wanted)}, but the files of {folder} have {found.total} rows"
                raise FileError(indices, problem, "give the index file of these CSV files")
            missing = tuple(row for row in wanted if row not in found.good)
            rows = [found.good[row] for row in wanted if row in found.good]
        report = found.report(missing)
        if report.bad:
            warnings.warn(f"{folder}: {report}.", stacklevel=3)
        parents, texts, scores = ([getattr(row, name) for row in rows] for name in ("parent", "text", "score"))
        return cls(parents, texts, scores, [row.file for row in rows], [row.line for row in rows], report)

    def __len__(self) -> int:
        """Number of comments."""
        return len(self.comments)

    def place(self, number: int) -> str:
        """Where a comment stands: its file and line, or its number if it was not read."""
        return f"{self.files[number]} line {self.lines[number]}" if self.files else f"comment {number}"

    def take(self, numbers: Iterable[int]) -> RedditComments:
        """The comments with these numbers, in this order."""
        numbers = list(numbers)
        names = [field.name for field in fields(self) if field.name != "report"]
        columns = {name: [getattr(self, name)[i] for i in numbers] for name in names if getattr(self, name)}
        return RedditComments(**{"parents": (), "comments": (), "scores": (), **columns}, report=self.report)

    def with_scores(self, *, at_least: float | None = None, quantile: float | None = None) -> RedditComments:
        """The comments with a score, upvotes minus downvotes, of at least a cutoff.

        The ILQL paper chooses comments by their rewards instead: ``CommentRows(cutoff=)``.

        Args:
            at_least: the cutoff.
            quantile: the cutoff is number ``ceil(quantile * (N - 1))``, counted from 0, of the N scores in ascending
                order: 0.9 keeps the best tenth, and others whose score equals the cutoff.

        Raises:
            ValueError: not exactly one is given, or no comment has such a score.
        """
        if (at_least is None) == (quantile is None):
            raise ValueError(f"Give either at_least or quantile, got at_least={at_least} and quantile={quantile}.")
        if quantile is not None:
            within("quantile", quantile, 0.0, 1.0)
            at_least = sorted(self.scores)[math.ceil(quantile * (len(self) - 1) - _ROUNDING)] if self.scores else 0
        assert at_least is not None
        finite("at_least", at_least, low=None)
        kept = [i for i, score in enumerate(self.scores) if score >= at_least]
        if not kept:
            best = max(self.scores, default=None)
            raise ValueError(f"None of {len(self)} comments has a score of at least {at_least:g}; the best is {best}.")
        return self.take(kept)

    def split(self, fraction: float, *, seed: int = 0) -> tuple[RedditComments, RedditComments]:
        """Split off a fraction of the comments to test on; comments with the same text stay together.

        A hash of the seed and the text decides, so a comment falls on the same side in every dataset.

        Args:
            fraction: expected fraction of the second part, between 0 and 1.
            seed: of the hash.

        Returns:
            The rest, and the part that was split off.
        """
        within("fraction", fraction, 0.0, 1.0, inclusive=False)
        held_out = [_uniform(f"{seed} {text}") < fraction for text in self.comments]
        return (
            self.take(i for i, out in enumerate(held_out) if not out),
            self.take(i for i, out in enumerate(held_out) if out),
        )

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


class _Found(NamedTuple):
    """What was read from the two files."""

    good: dict[int, CommentRow]
    """The wanted rows by their numbers."""
    bad: list[BadRow]
    """All malformed rows."""
    total: int
    """Number of all rows."""

    def report(self, missing: tuple[int, ...] = ()) -> ReadReport:
        return ReadReport(self.total - len(self.bad), tuple(self.bad), missing)


def _read(folder: str | Path, wanted: set[int] | None, encoding: str, on_bad_rows: str) -> _Found:
    """The wanted rows, by default all; raises FileError for malformed rows if ``on_bad_rows`` is "raise"."""
    one_of("on_bad_rows", on_bad_rows, ("raise", "report"))
    good, bad, count = dict[int, CommentRow](), list[BadRow](), 0
    for row in read_comment_rows(folder, encoding=encoding):
        count += 1
        if isinstance(row, BadRow):
            bad.append(row)
        elif wanted is None or row.row in wanted:
            good[row.row] = row
    found = _Found(good, bad, count)
    if bad and on_bad_rows == "raise":
        raise FileError(folder, f"has malformed rows ({found.report()})", _BAD_ROWS)
    return found


def _uniform(text: str) -> float:
    """A number in [0, 1) from a hash."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7]) / 2.0**56
