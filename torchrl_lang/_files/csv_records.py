"""Records of a CSV file that may be damaged: every line belongs to a record or to an error."""

from __future__ import annotations

import codecs
import csv
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from threading import RLock
from typing import NamedTuple

from torchrl_lang._files.errors import FileError, one_line
from torchrl_lang._files.readers import regular_file

__all__ = ["CSVFault", "CSVRecord", "read_csv_records"]

_REMEDY = "give a CSV file, UTF-8 or with its encoding as an option"
_LONGEST_FIELD = 1 << 20
"""Characters of a field. Without a limit, each quote that is never closed would have the rest of the file parsed."""


_LIMIT_LOCK = RLock()


class CSVFault(StrEnum):
    """What is wrong with a record of a CSV file.

    Examples:
        >>> from torchrl_lang._files import CSVFault
        >>> str(CSVFault.NUL)
        'a NUL byte'
    """

    QUOTES = "quotes that do not match"
    EMPTY = "an empty line"
    FIELDS = "another number of fields than the header"
    LENGTH = f"a field of more than {_LONGEST_FIELD:,} characters"
    NUL = "a NUL byte"
    ENCODING = "a byte that is not of the encoding"


class CSVRecord(NamedTuple):
    """The fields of a record, or the reason why there are none.

    Examples:
        >>> from torchrl_lang._files import CSVRecord
        >>> CSVRecord(3, 3, ("a", "b")).fields[0]
        'a'
    """

    line: int
    """Its first line, counted from 1."""
    last_line: int
    fields: tuple[str, ...] = ()
    error: str = ""
    """The reason, with what was found; empty if the record is well-formed."""
    fault: CSVFault | None = None
    """The kind of the error."""


def read_csv_records(
    path: str | Path,
    *,
    encoding: str = "utf-8",
    is_row: Callable[[Sequence[str]], bool] | None = None,
    ragged: bool = False,
) -> Iterator[CSVRecord]:
    r"""The records of a CSV file in order, its header first, read as a stream.

    Fields may be quoted and then hold commas, doubled quotes and line breaks. A record has an error if its quotes do
    not match, its number of fields is not that of the header, a field is longer than 1,048,576 characters, it is an
    empty line, or it holds a NUL byte or a byte that is not of the encoding. Empty lines at the end of the file are
    ignored.

    After an error of quotes the reader continues with the next line: a quote that is never closed costs its own record,
    not those up to the next quote. Lines that follow such a record and do not look like a row are counted to it, as its
    last lines; in a file that is not ragged, those that lack more than one field. There ``is_row`` serves to find
    quotes with rows between them: those of a record of several lines do not match if a line inside, or both the first
    and the last one, has as many fields as the header when it is split at all commas, and looks like a row.

    Args:
        path: the file.
        encoding: ``"utf-8"``, with or without a byte order mark, or another one, such as ``"latin-1"``.
        is_row: whether fields look like those of a row; in a file that is not ragged, as many as the header has.
        ragged: records need not have as many fields as the first.

    Raises:
        FileError: the file is missing or cannot be read.
        ValueError: Python has no such encoding.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_csv_records
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "comments.csv"
        ...     _ = path.write_text('id,text\n1,"a ""b"",\nc"\n2,"open\n3,d\n')
        ...     for record in read_csv_records(path):
        ...         print(record.line, record.fields or record.error)
        1 ('id', 'text')
        2 ('1', 'a "b",\nc')
        4 has quotes that do not match (unexpected end of data)
        5 ('3', 'd')
    """
    path = regular_file(path, _REMEDY)
    try:
        name = codecs.lookup(encoding).name
        codec = "utf-8-sig" if name == "utf-8" else name
        file = open(path, encoding=codec, errors="surrogateescape", newline="")  # noqa: SIM115 (closed below)
    except (LookupError, ValueError) as error:  # a name that is unknown, or none at all
        raise ValueError(f"encoding={encoding!r} is no text encoding of Python: give one such as 'latin-1'.") from error
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", _REMEDY) from error
    with file:
        try:
            yield from _without_last_empty_lines(_records(file, name, is_row, ragged))
        except (OSError, UnicodeError) as error:  # such as UTF-16 without a byte order mark
            raise FileError(path, f"cannot be read as {name} ({one_line(error)})", _REMEDY) from error


def _records(
    file: Iterator[str], encoding: str, is_row: Callable[[Sequence[str]], bool] | None, ragged: bool
) -> Iterator[CSVRecord]:
    ahead = deque[str]()  # lines that a broken record has read, to be read again
    broken: CSVRecord | None = None  # the last record, if its quotes do not match
    number, width = 1, 0
    is_whole = None if ragged or is_row is None else lambda fields: len(fields) == width and is_row(fields)
    while (parsed := _parse(ahead, file, is_whole)) is not None:
        record = parsed.record(number)
        width = width or len(parsed.fields)
        if ragged and is_row is not None:
            row_like = is_row(parsed.fields)
        else:
            row_like = len(parsed.fields) >= width - 1  # maybe with a fault of its own
        if broken is not None and not row_like:
            broken = broken._replace(last_line=record.last_line)
        else:
            if broken is not None:
                yield broken
            broken = record if record.fault is CSVFault.QUOTES else None
            if broken is None:
                yield record if record.error else _checked(record, encoding, None if ragged else width)
        number = record.last_line + 1
    if broken is not None:
        yield broken


class _Parsed(NamedTuple):
    """A record of a number of lines; with a fault, it is one line, split at all of its commas."""

    lines: int
    fields: list[str]
    fault: CSVFault | None = None
    detail: str = ""

    def record(self, line: int) -> CSVRecord:
        record = CSVRecord(line, line + self.lines - 1, tuple(self.fields))
        return record if self.fault is None else _with_error(record, self.fault, f"has {self.fault}{self.detail}")


def _parse(ahead: deque[str], file: Iterator[str], is_row: Callable[[Sequence[str]], bool] | None) -> _Parsed | None:
    """The next record; None at the end of the file."""
    lines = list[str]()

    def following() -> Iterator[str]:
        while ahead:
            lines.append(ahead.popleft())
            yield lines[-1]
        for line in file:
            lines.append(line)
            yield line

    try:
        with _field_limit():
            fields = next(csv.reader(following(), strict=True))
    except StopIteration:
        return None
    except csv.Error as error:
        too_long = "field limit" in str(error)
        if too_long and len(lines) == 1:
            fault, detail = CSVFault.LENGTH, ""
        else:  # a field of many lines is rather a quote that is never closed
            fault, detail = CSVFault.QUOTES, f" ({f'or {CSVFault.LENGTH} between them' if too_long else error})"
    else:
        if is_row is None or not _rows_between(lines, is_row):
            return _Parsed(len(lines), fields)
        fault, detail = CSVFault.QUOTES, " (there are rows between them)"
    ahead.extendleft(reversed(lines[1:]))
    return _Parsed(1, lines[0].split(","), fault, detail)


@contextmanager
def _field_limit() -> Iterator[None]:
    """The longest field of this module's readers: the limit belongs to the process, and others rely on theirs."""
    with _LIMIT_LOCK:
        before = csv.field_size_limit(_LONGEST_FIELD)
        try:
            yield
        finally:
            csv.field_size_limit(before)


def _rows_between(lines: Sequence[str], is_row: Callable[[Sequence[str]], bool]) -> bool:
    """Whether the quotes of a record's lines have other rows between them."""
    if len(lines) == 1:
        return False
    first, *inside, last = (is_row(line.split(",")) for line in lines)
    return any(inside) or (first and last)


def _with_error(record: CSVRecord, fault: CSVFault, error: str) -> CSVRecord:
    return record._replace(fields=(), error=error, fault=fault)


def _checked(record: CSVRecord, encoding: str, width: int | None) -> CSVRecord:
    """The record, with an error instead of its fields if something but its quotes is wrong."""
    if not record.fields:
        return _with_error(record, CSVFault.EMPTY, f"is {CSVFault.EMPTY}")
    if width is not None and len(record.fields) != width:
        return _with_error(record, CSVFault.FIELDS, f"has {len(record.fields)} fields, the header has {width}")
    text = "".join(record.fields)
    if "\0" in text:
        return _with_error(record, CSVFault.NUL, f"holds {CSVFault.NUL}")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a byte that could not be decoded is a surrogate
        byte = ord(text[error.start]) & 0xFF
        return _with_error(record, CSVFault.ENCODING, f"holds a byte that is not {encoding} ({byte:#04x})")
    return record


def _without_last_empty_lines(records: Iterator[CSVRecord]) -> Iterator[CSVRecord]:
    empty = list[CSVRecord]()
    for record in records:
        if record.fault is CSVFault.EMPTY:
            empty.append(record)
        else:
            yield from empty
            empty.clear()
            yield record
