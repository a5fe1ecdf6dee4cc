"""Sources of JSON records, and the loop that converts them with an error for every mistake."""

from __future__ import annotations

import codecs
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torchrl_lang._checks import one_of
from torchrl_lang._files import FileError, regular_file

__all__ = ["BadLine", "LineFile", "Records", "good_items"]

T = TypeVar("T")

_SHOWN = 5
_REMEDY = "fix them, or leave them out with on_error='skip'"


class BadLine(NamedTuple):
    """A line that cannot be read, and the reason."""

    line: int
    """Counted from 1."""
    reason: str


class LineFile:
    """The lines of a file, as bytes."""

    item, no_dialogue = "line", "give a file with one JSON object per line"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        remedy = "give the path of a text file with one JSON object per line"
        with regular_file(self.path, remedy=remedy).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    yield number, line

    def error(self, what: str, remedy: str) -> FileError:
        """The error of a mistake in the file."""
        return FileError(self.path, what, remedy)


class Records:
    """Mappings from Python."""

    item, no_dialogue = "record", "give at least one record"

    def __init__(self, records: Iterable[Any]) -> None:
        self.records = records

    def __str__(self) -> str:
        return "the records"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self.records, start=1))

    def error(self, what: str, remedy: str) -> ValueError:
        """The error of a mistake in the records."""
        return ValueError(f"The iterable {what}: {remedy}.")


def good_items(
    source: LineFile | Records, convert: Callable[[Any], T], on_error: str, bad: list[BadLine]
) -> Iterator[tuple[int, T]]:
    """Number and value of each item that ``convert`` accepts; collects the others, and raises or warns at the end."""
    one_of("on_error", on_error, ("raise", "skip"))
    for number, item in source:
        try:
            value = convert(item.decode("utf-8") if isinstance(item, bytes) else item)
        except (ValueError, RecursionError) as error:
            bad.append(BadLine(number, _reason(error)))
            if on_error == "raise" and len(bad) == _SHOWN:
                break
        else:
            yield number, value
    if not bad:
        return
    shown = "; ".join(f"{source.item} {line}: {reason}" for line, reason in bad[:_SHOWN])
    count = f"{len(bad)} bad {source.item}{'s' * (len(bad) > 1)}"
    if on_error == "raise":
        least = "at least " * (len(bad) == _SHOWN)  # reading stopped here
        raise source.error(f"holds {least}{count} ({shown})", _REMEDY)
    more = "; ..." if len(bad) > _SHOWN else ""
    warnings.warn(f"{count} of {source} skipped ({shown}{more}).", stacklevel=4)


def _reason(error: ValueError | RecursionError) -> str:
    """Why an item is bad."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg} at character {error.pos + 1})"
    return "its JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)
