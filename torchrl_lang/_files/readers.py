"""Read text, JSON, CSV and tensors from files that may be damaged; every failure is a :class:`FileError`."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:  # the command line reads its options before it needs torch
    from torch import Tensor

# Depending on the field, an edited header of a safetensors file raises any of these.
_DAMAGED_TENSORS = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError)

MAX_TEXT_BYTES = 1 << 30
"""Larger text files are rejected unread; the files that this library writes are far smaller."""


class FileError(ValueError):
    """A file is missing, damaged, or holds something other than what was expected.

    The message is one line: the file, what was found, what was expected, and the remedy.

    Args:
        path: the file or folder.
        found: what is wrong with it.
        remedy: what the user can do.

    Examples:
        >>> from torchrl_lang.data import FileError
        >>> str(FileError("data/manifest.json", "is not valid JSON", "write the dataset again"))
        'data/manifest.json is not valid JSON: write the dataset again.'
    """

    def __init__(self, path: str | Path, found: str, remedy: str) -> None:
        self.path, self.remedy = Path(path), remedy
        super().__init__(f"{path} {' '.join(found.split())}: {remedy}.")


def shorten(value: object, limit: int = 80) -> str:
    """``repr(value)`` cut to ``limit`` characters, for error messages about values of any size."""
    # Cut the value first: building the repr of ten million characters to show eighty would be slow.
    long = isinstance(value, (str, bytes, list, tuple)) and len(value) > limit
    text = repr(value[:limit] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text[: limit - 3] + "..." if long or len(text) > limit else text


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of another library's error as one line of at most ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def mistake(error: ValidationError) -> str:
    """The first mistake that pydantic found, as the rest of a sentence that begins with the file."""
    first = error.errors(include_url=False)[0]
    name, found = ".".join(map(str, first["loc"]))[:80], shorten(first["input"])
    if first["type"] == "missing":
        return f'has no field "{name}"'
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f'has the unknown field "{name}"'
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    needs_object = first["type"] in ("model_type", "dataclass_type", "dict_type")
    expected = "a JSON object" if needs_object else message
    if name:
        return f'has {found} as "{name}", expected {expected}'
    return f"is {found}, expected {expected}" if needs_object else message[:1].lower() + message[1:]


@contextmanager
def file_errors(path: str | Path, found: str, remedy: str, *errors: type[Exception]) -> Iterator[None]:
    """Raise what a ``with`` block raises of ``errors`` as a :class:`FileError`, with its message in brackets.

    Without ``found`` the message stands for it. A :class:`FileError` and lack of memory pass as they are.

    Examples:
        >>> from torchrl_lang._files import file_errors
        >>> with file_errors("run/seed", "holds no number", "write 0", ValueError):
        ...     int("one")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.readers.FileError: run/seed holds no number (invalid literal for int() ...'one'): write 0.
    """
    try:
        yield
    except errors as error:
        if isinstance(error, FileError | MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
            raise
        text = mistake(error) if isinstance(error, ValidationError) else one_line(error)
        text = text if text.endswith("...") else text.rstrip(".")
        raise FileError(path, f"{found} ({text})" if found else text, remedy) from error


# -- paths -------------------------------------------------------------------------------------------------------------


def regular_file(path: str | Path, remedy: str) -> Path:
    """``path``, if it is a regular file. (Reading a pipe or a device could block forever.)"""
    path = Path(path)
    if not os.path.isfile(path):
        raise FileError(path, "is not a regular file" if os.path.exists(path) else "is missing", remedy)
    return path


def file_in(folder: str | Path, name: object, *, remedy: str, links: bool = False) -> Path:
    """The path of a file that a manifest lists: it must be relative and lie inside ``folder``.

    With ``links`` symbolic links may lead out of the folder, as in the Hugging Face cache.
    """
    folder = Path(folder)
    is_name = isinstance(name, str) and bool(name) and "\0" not in name and "\\" not in name
    parts = PurePosixPath(str(name)) if is_name else PurePosixPath("..")
    inside = is_name and (links or Path(os.path.realpath(folder / parts)).is_relative_to(os.path.realpath(folder)))
    if parts.is_absolute() or ".." in parts.parts or not inside:
        raise FileError(folder, f"names the file {shorten(name)}, which lies outside of it or is no name", remedy)
    return folder / parts


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- text and JSON -----------------------------------------------------------------------------------------------------


def read_text(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 file; a byte order mark at its start is dropped, and a file of more bytes is rejected unread."""
    path = regular_file(path, remedy)
    if (size := path.stat().st_size) > max_bytes:
        raise FileError(path, f"has {size} bytes, more than the limit of {max_bytes}", remedy)
    with file_errors(path, "cannot be read", remedy, OSError):
        content = path.read_bytes()
    with file_errors(path, "is not UTF-8 text", remedy, UnicodeError):
        return content.decode("utf-8-sig")


def _json(path: str | Path, kind: type, remedy: str, max_bytes: int) -> Any:
    """Read JSON; ``NaN``, ``Infinity``, integers of more than 64 bits and repeated keys are errors."""
    text = read_text(path, remedy=remedy, max_bytes=max_bytes)
    with file_errors(path, "is not valid JSON", remedy, ValueError, RecursionError):
        content = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant, parse_int=_int)
    if not isinstance(content, kind):
        raise FileError(path, f"holds {shorten(content)}, not a JSON {'object' if kind is dict else 'list'}", remedy)
    return content


def read_json(path: str | Path, *, remedy: str) -> dict[str, Any]:
    """Read a JSON object."""
    return _json(path, dict, remedy, MAX_TEXT_BYTES)


def read_json_list(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> list[Any]:
    """Read a JSON list."""
    return _json(path, list, remedy, max_bytes)


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


# -- tensors -----------------------------------------------------------------------------------------------------------


def read_tensors(path: str | Path, *, remedy: str) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU."""
    from safetensors.torch import load_file  # with torch

    path = regular_file(path, remedy)
    with file_errors(path, "is not a complete safetensors file", remedy, *_DAMAGED_TENSORS):
        return load_file(path)


class TensorHeader(NamedTuple):
    """The dtype (``"F32"``, ``"BF16"``, ``"I64"``) and shape of a tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def read_tensor_headers(path: str | Path, *, remedy: str) -> dict[str, TensorHeader]:
    """Read the names, dtypes and shapes of the tensors in a safetensors file, but not the tensors."""
    path = regular_file(path, remedy)
    with (
        file_errors(path, "is not a complete safetensors file", remedy, *_DAMAGED_TENSORS),
        safe_open(path, framework="pt") as file,
    ):
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}


# -- CSV ---------------------------------------------------------------------------------------------------------------

Row = dict[str, int | float]


def parse_rows(text: str, path: str | Path, *, remedy: str) -> tuple[list[str], list[tuple[int, Row]]]:
    r"""Parse a CSV text of numbers into the column names and pairs of line number and row.

    The first line names the columns. Empty cells are left out of a row; other cells that are no number are an error.

    Examples:
        >>> from torchrl_lang._files import parse_rows
        >>> parse_rows("step,loss,return\n1,0.5,\n2,0.25,-3.0\n", "log.csv", remedy="delete it")
        (['step', 'loss', 'return'], [(2, {'step': 1, 'loss': 0.5}), (3, {'step': 2, 'loss': 0.25, 'return': -3.0})])
    """
    reader = csv.reader(io.StringIO(text))
    rows: list[tuple[int, Row]] = []
    try:
        names = next(reader, [])
        if len(set(names)) < len(names) or not all(name and name.isprintable() for name in names):
            raise ValueError(f"a column of {shorten(names)} has no name or is repeated")
        for cells in reader:
            cell_of = dict(zip(names, cells, strict=True))
            rows.append((reader.line_num, {name: _number(cell) for name, cell in cell_of.items() if cell}))
    except (csv.Error, ValueError) as error:
        raise FileError(path, f"is not a CSV file of numbers (line {reader.line_num}: {error})", remedy) from error
    return names, rows


def _number(cell: str) -> int | float:
    number = float(cell)
    return int(cell) if cell.lstrip("-").isdecimal() and abs(int(cell)) < 2**63 else number


class CSVRecord(NamedTuple):
    """The fields of a record, or the reason why there are none."""

    line: int
    """Its first line, counted from 1."""
    fields: tuple[str, ...] = ()
    error: str = ""
    """The reason, with what was found; empty if the record is well-formed."""


def read_csv_records(path: str | Path, *, encoding: str = "utf-8", ragged: bool = False) -> Iterator[CSVRecord]:
    r"""The records of a CSV file in order, its header first, read as a stream by Python's reader.

    A record has an error if its quotes do not match, it holds NUL or a byte that is not of the encoding, or its number
    of fields is not that of the header, unless records may be ``ragged``. Nothing is repaired: a quote that is never
    closed costs the records up to the next quote. Empty lines are skipped.

    Args:
        path: the file.
        encoding: ``"utf-8"``, with or without a byte order mark, or another one, such as ``"latin-1"``.
        ragged: records need not have as many fields as the first.

    Raises:
        FileError: the file is missing or cannot be read, or Python has no such encoding.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_csv_records
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "comments.csv"
        ...     _ = path.write_text('id,text\n1,"a ""b"",\nc"\n2,"open" quote\n3\n')
        ...     for record in read_csv_records(path):
        ...         print(record.line, record.fields or record.error)
        1 ('id', 'text')
        2 ('1', 'a "b",\nc')
        4 is no CSV record (',' expected after '"')
        5 has 1 fields, the header has 2
    """
    remedy = "give a CSV file, UTF-8 or with its encoding as an option"
    path = regular_file(path, remedy)
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    # A LookupError is an encoding that Python does not have, a UnicodeError such as UTF-16 without a byte order mark.
    with (
        file_errors(path, f"cannot be read as {encoding}", remedy, OSError, UnicodeError, LookupError),
        open(path, encoding=codec, errors="surrogateescape", newline="") as file,
    ):
        yield from _records(file, encoding, ragged)


def _records(file: Iterator[str], encoding: str, ragged: bool) -> Iterator[CSVRecord]:
    reader, width = csv.reader(file, strict=True), 0
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:  # the reader continues with the next line
            yield CSVRecord(line, error=f"is no CSV record ({error})")
            continue
        if fields is None:
            return
        if not fields:
            continue
        width = width or len(fields)
        foreign = [character for field in fields for character in field if "\udc80" <= character <= "\udcff"]
        if foreign:  # a byte that could not be decoded is a surrogate
            found = f"holds a byte that is not {encoding} ({ord(foreign[0]) & 0xFF:#04x})"
            yield CSVRecord(line, error=found)
        elif any("\0" in field for field in fields):
            yield CSVRecord(line, error="holds a NUL byte")
        elif len(fields) != width and not ragged:
            yield CSVRecord(line, error=f"has {len(fields)} fields, the header has {width}")
        else:
            yield CSVRecord(line, tuple(fields))
