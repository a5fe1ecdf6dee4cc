"""The error that all file readers raise."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path, PurePosixPath
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from safetensors import SafetensorError, safe_open

__all__ = [
    "CSVFault",
    "CSVRecord",
    "FileError",
    "TensorHeader",
    "file_digest",
    "file_in",
    "one_line",
    "parse_rows",
    "read_csv_records",
    "read_json",
    "read_json_list",
    "read_json_value",
    "read_tensor_headers",
    "read_tensors",
    "read_text",
    "regular_file",
    "shorten",
    "unique_keys",
]


class FileError(ValueError):
    """A file is missing, damaged, or holds something other than what was expected.

    The message is one line: the file, what was found, what was expected, and the remedy.

    Args:
        path: the file or folder.
        found: what is wrong with it.
        remedy: what the user can do.

    Examples:
        >>> from torchrl_lang._files import FileError
        >>> str(FileError("data/manifest.json", "is not valid JSON", "write the dataset again"))
        'data/manifest.json is not valid JSON: write the dataset again.'
    """

    def __init__(self, path: str | Path, found: str, remedy: str) -> None:
        self.path, self.remedy = Path(path), remedy
        super().__init__(f"{path} {' '.join(found.split())}: {remedy}.")


def shorten(value: object, limit: int = 80) -> str:
    """``repr(value)`` cut to ``limit`` characters, for error messages about values of any size.

    Examples:
        >>> from torchrl_lang._files import shorten
        >>> shorten("abcdefgh", limit=6)
        "'ab..."
    """
    # Cut the value first: building the repr of ten million characters to show eighty would be slow.
    text = repr(value[:limit] if isinstance(value, (str, bytes, list, tuple)) else value)
    cut = len(text) > limit or (isinstance(value, (str, bytes, list, tuple)) and len(value) > limit)
    return text[: limit - 3] + "..." if cut else text


def one_line(error: BaseException, limit: int = 300) -> str:
    r"""The message of another library's error as one line of at most ``limit`` characters.

    Examples:
        >>> from torchrl_lang._files import one_line
        >>> one_line(ValueError("no model;\n  see the documentation"))
        'no model; see the documentation'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


if TYPE_CHECKING:  # the command line reads its options before it needs torch
    from torch import Tensor


# Depending on the field, an edited header of a safetensors file raises any of these.
_DAMAGED_TENSORS = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError)

MAX_TEXT_BYTES = 1 << 30
"""Larger text files are rejected unread; the files that this library writes are far smaller."""


def read_text(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    r"""Read a UTF-8 file; a byte order mark at its start is dropped.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.
        max_bytes: a larger file is rejected unread.

    Raises:
        FileError: the file is missing, not a regular file, too large, or not UTF-8.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_text
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "words.txt"
        ...     _ = path.write_bytes(b"cr\xe2ne")
        ...     read_text(path, remedy="save it as UTF-8")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.readers.FileError: ... is not UTF-8 text (byte 2 is 0xe2): save it as UTF-8.
    """
    path = regular_file(path, remedy)
    size = path.stat().st_size
    if size > max_bytes:
        raise FileError(path, f"has {size} bytes, more than the limit of {max_bytes}", remedy)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", remedy) from error
    except UnicodeDecodeError as error:
        found = f"is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
        raise FileError(path, found, remedy) from error


def read_json(path: str | Path, *, remedy: str) -> dict[str, Any]:
    """Read a JSON object.

    Constants that are not JSON (``NaN``, ``Infinity``) and repeated keys are errors.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.

    Raises:
        FileError: the file cannot be read as text, or its content is not a JSON object.
    """
    content = _parse_json(path, read_text(path, remedy=remedy), remedy)
    if not isinstance(content, dict):
        raise FileError(path, f"holds {shorten(content)}, not a JSON object", remedy)
    return content


def read_json_list(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> list[Any]:
    """Read a JSON list, with the checks of :func:`read_json`.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.
        max_bytes: a larger file is rejected unread.

    Raises:
        FileError: the file cannot be read as text, or its content is not a JSON list.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_json_list
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "rewards.json"
        ...     _ = path.write_text("[0.5, 0.25]")
        ...     read_json_list(path, remedy="download it again")
        [0.5, 0.25]
    """
    content = read_json_value(path, remedy=remedy, max_bytes=max_bytes)
    if not isinstance(content, list):
        raise FileError(path, f"holds {shorten(content)}, not a JSON list", remedy)
    return content


def read_json_value(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Read JSON of any kind, with the arguments and checks of :func:`read_json_list`.

    Raises:
        FileError: the file cannot be read as text or is not JSON.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_json_value
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "rewards.json"
        ...     _ = path.write_text("{}")
        ...     read_json_value(path, remedy="download it again")
        {}
    """
    return _parse_json(path, read_text(path, remedy=remedy, max_bytes=max_bytes), remedy)


def _parse_json(path: str | Path, text: str, remedy: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant, parse_int=_int)
    except (ValueError, RecursionError) as error:
        raise FileError(path, f"is not valid JSON ({error})", remedy) from error


def read_tensors(path: str | Path, *, remedy: str) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU.

    Raises:
        FileError: the file is missing or damaged.
    """
    from safetensors.torch import load_file  # with torch

    path = regular_file(path, remedy)
    try:
        return load_file(path)
    except _DAMAGED_TENSORS as error:
        raise FileError(path, f"is not a complete safetensors file ({error})", remedy) from error


class TensorHeader(NamedTuple):
    """The dtype (``"F32"``, ``"BF16"``, ``"I64"``) and shape of a tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def read_tensor_headers(path: str | Path, *, remedy: str) -> dict[str, TensorHeader]:
    """Read the names, dtypes and shapes of the tensors in a safetensors file, but not the tensors.

    Raises:
        FileError: the file is missing or damaged.
    """
    path = regular_file(path, remedy)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except _DAMAGED_TENSORS as error:
        raise FileError(path, f"is not a complete safetensors file ({error})", remedy) from error


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_in(folder: str | Path, name: object, *, remedy: str, links: bool = False) -> Path:
    """The path of a file that a manifest lists, which must lie inside ``folder``.

    Args:
        folder: the folder of the manifest.
        name: the name in the manifest: a relative path with ``/`` between its parts.
        remedy: what the user can do, for the error message.
        links: accept symbolic links out of the folder, as in the Hugging Face cache.

    Raises:
        FileError: ``name`` is not a relative path, or leads out of the folder (``..`` or a symbolic link).

    Examples:
        >>> from torchrl_lang._files import file_in
        >>> file_in("data", "../../etc/passwd", remedy="write the dataset again")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.readers.FileError: data names the file '../../etc/passwd', which lies outside of it: ...
    """
    folder = Path(folder)
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise FileError(folder, f"names the file {shorten(name)}, which is not a valid file name", remedy)
    parts = PurePosixPath(name)
    path = folder / parts
    try:
        inside = links or path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a link to itself
        raise FileError(folder, f"names the file {shorten(name)}, which cannot be found ({error})", remedy) from error
    if parts.is_absolute() or ".." in parts.parts or not inside:
        raise FileError(folder, f"names the file {shorten(name)}, which lies outside of it", remedy)
    return path


def regular_file(path: str | Path, remedy: str) -> Path:
    """``path``, if it is a regular file. (Reading a pipe or a device could block forever.)

    Raises:
        FileError: ``path`` is missing or not a regular file.
    """
    path = Path(path)
    try:
        regular, exists = path.is_file(), path.exists()
    except (OSError, ValueError) as error:
        raise FileError(path, f"cannot be read ({error})", remedy) from error
    if not regular:
        raise FileError(path, "is not a regular file" if exists else "is missing", remedy)
    return path


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` for JSON readers that raises ValueError if a key is repeated."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {shorten(key)} is repeated in one object")
        content[key] = value
    return content


def _int(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{shorten(number)} has more than 64 bits")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


Row = dict[str, int | float]


def parse_rows(text: str, path: str | Path, *, remedy: str) -> tuple[list[str], list[tuple[int, Row]]]:
    r"""Parse a CSV text into the column names and pairs of line number and row; empty cells are left out of a row.

    Args:
        text: the content of the file.
        path: the file, for the error message.
        remedy: what the user can do if the text cannot be parsed, for the error message.

    Raises:
        FileError: a column name is missing or repeated, a row has the wrong number of cells, or a cell is not a number.

    Examples:
        >>> from torchrl_lang._files import parse_rows
        >>> parse_rows("step,loss,return\n1,0.5,\n2,0.25,-3.0\n", "log.csv", remedy="delete it")
        (['step', 'loss', 'return'], [(2, {'step': 1, 'loss': 0.5}), (3, {'step': 2, 'loss': 0.25, 'return': -3.0})])
    """
    reader = csv.reader(io.StringIO(text))
    try:
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise FileError(path, f"is not a CSV file (line {reader.line_num}: {error})", remedy) from error
    names = lines[0][1] if lines else []
    if len(set(names)) < len(names) or not all(name and name.isprintable() for name in names):
        raise FileError(path, f"has the columns {shorten(names)}, one of which has no name or is repeated", remedy)
    rows = []
    for line, cells in lines[1:]:
        try:
            row = {name: _number(cell) for name, cell in zip(names, cells, strict=True) if cell}
        except ValueError as error:
            found = f"holds {shorten(cells)} on line {line}, expected numbers for {shorten(names)}"
            raise FileError(path, found, remedy) from error
        rows.append((line, row))
    return names, rows


def _number(cell: str) -> int | float:
    number = float(cell)
    return int(cell) if cell.lstrip("-").isdecimal() and abs(number) < 2**63 else number


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
