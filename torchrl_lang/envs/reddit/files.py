"""Read the files of Reddit comments with scores: two CSV files, and JSON files that select rows of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_lang._files import CSVRecord, FileError, read_csv_records, read_json_list
from torchrl_lang.text.json_checks import show

__all__ = ["FILES", "BadRow", "CommentRow", "ReadReport", "read_comment_rows", "read_row_indices"]

FILES = ("comments_positive.csv", "comments_negative.csv")
"""The names of the two files, in the order in which their rows are counted."""

COMMENT, SCORE, PARENT = 4, 5, 10
"""Columns, counted from 0; the names in the header do not matter, but that of the score is no number."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NO_NAME = re.compile(r"[-+.]*(\d+([.,]\d*)?(e[-+]?\d+)?|nan|inf|infinity|null|none|na|n/a)?", re.IGNORECASE)
"""A number, or what programs write for a missing one: a score, not the name of a column."""
_COLUMNS = f"give a header and rows with the comment in column {COMMENT}, its score in {SCORE}, its parent in {PARENT}"
_INDICES = "give a JSON list of different rows, counted from 0 through both CSV files without their headers"
_SHOWN = 5


class CommentRow(NamedTuple):
    """A comment and where it stands.

    Examples:
        >>> from torchrl_lang.envs.reddit import CommentRow
        >>> CommentRow(0, "comments_positive.csv", 2, "my tomatoes are ripe", "well done", 12).score
        12
    """

    row: int
    """Counted from 0 through both files, without headers and with malformed rows, as index files count."""
    file: str
    line: int
    """Its first line, counted from 1."""
    parent: str
    text: str
    score: int


class BadRow(NamedTuple):
    """A malformed row, and the reason.

    Examples:
        >>> from torchrl_lang.envs.reddit import BadRow
        >>> print(BadRow(7, "comments_positive.csv", 9, 10, "has 3 fields, the header has 12"))
        comments_positive.csv line 9 has 3 fields, the header has 12
    """

    row: int
    """Counted as in :class:`CommentRow`."""
    file: str
    line: int
    last_line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} line {self.line} {self.reason}"


class ReadReport(NamedTuple):
    """What reading the files found: every row is either read or among the bad ones.

    Examples:
        >>> from torchrl_lang.envs.reddit import BadRow, ReadReport
        >>> print(ReadReport(12, (BadRow(7, "comments_positive.csv", 9, 9, "is an empty line"),)))
        12 rows were read, 1 is malformed: comments_positive.csv line 9 is an empty line
    """

    rows: int
    """Number of well-formed rows."""
    bad: tuple[BadRow, ...] = ()
    bad_indices: tuple[int, ...] = ()
    """Rows of the index file that are malformed."""

    def __str__(self) -> str:
        shown = "; ".join(map(str, self.bad[:_SHOWN])) + ("; ..." if len(self.bad) > _SHOWN else "")
        verb = "is" if len(self.bad) == 1 else "are"
        selected = f" ({len(self.bad_indices)} of the index file)" if self.bad_indices else ""
        text = f"{self.rows} rows were read, {len(self.bad)} {verb} malformed{selected}"
        return f"{text}: {shown}" if self.bad else text


def read_comment_rows(folder: str | Path, *, encoding: str = "utf-8") -> Iterator[CommentRow | BadRow]:
    """The rows of ``comments_positive.csv``, then those of ``comments_negative.csv``, read as a stream.

    The ILQL paper's code reads these columns: the comment from column 4 (counted from 0), its score, an integer, from
    column 5, and the text that it replies to from column 10. A row is malformed if its record is (see
    :func:`~torchrl_lang._files.read_csv_records`), its comment is empty or its score no integer.

    Args:
        folder: has the two files.
        encoding: "utf-8", with or without a byte order mark, or another one, such as "latin-1".

    Raises:
        FileError: a file is missing or cannot be read, has no header, or one with fewer than 11 columns.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.reddit import generate_reddit_comments, read_comment_rows
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_reddit_comments(home, pairs=20)
        ...     rows = list(read_comment_rows(home))
        >>> len(rows), rows[0].line
        (20, 2)
    """
    row = 0
    for file in FILES:
        path = Path(folder) / file
        records = read_csv_records(path, encoding=encoding, is_row=_is_row)
        _check_header(path, next(records, None))
        for record in records:
            yield _read_row(row, file, record)
            row += 1


def _check_header(path: Path, header: CSVRecord | None) -> None:
    if header is None:
        raise FileError(path, "is empty", _COLUMNS)
    if header.error:
        raise FileError(path, f"has a header that {header.error}", _COLUMNS)
    if len(header.fields) <= PARENT:
        raise FileError(path, f"has a header of {len(header.fields)} columns, expected at least {PARENT + 1}", _COLUMNS)
    name = header.fields[SCORE].strip()
    if _NO_NAME.fullmatch(name):
        raise FileError(path, f"has no header, but {show(name)} as score in its first line", _COLUMNS)


def _is_row(fields: Sequence[str]) -> bool:
    return _INTEGER.fullmatch(fields[SCORE]) is not None


def _read_row(row: int, file: str, record: CSVRecord) -> CommentRow | BadRow:
    reason = record.error
    if not reason:
        text, score, parent = (record.fields[column] for column in (COMMENT, SCORE, PARENT))
        if not text.strip():
            reason = "has an empty comment"
        elif not _INTEGER.fullmatch(score.strip()):
            reason = f"has {show(score)} as score, expected an integer"
        else:
            return CommentRow(row, file, record.line, parent, text, int(score))
    return BadRow(row, file, record.line, record.last_line, reason)


def read_row_indices(path: str | Path) -> list[int]:
    """The rows that an index file selects, such as ``train_idxs.json``: a JSON list of integers.

    Raises:
        FileError: the file cannot be read, or its content is not a list of different integers of at least 0.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.envs.reddit import read_row_indices
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "train_idxs.json"
        ...     _ = path.write_text("[4, 0, 7]")
        ...     read_row_indices(path)
        [4, 0, 7]
    """
    indices: list[Any] = read_json_list(path, remedy=_INDICES)
    seen = set[int]()
    for place, index in enumerate(indices):
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise FileError(path, f"has {show(index)} as item {place}, expected an integer of at least 0", _INDICES)
        if index in seen:
            raise FileError(path, f"has the row {index} twice, again as item {place}", _INDICES)
        seen.add(index)
    return indices
