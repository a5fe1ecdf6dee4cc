"""Read typed fields from JSON files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from torchrl_lang._files.errors import FileError, shorten
from torchrl_lang._files.readers import read_json

__all__ = ["Fields"]

T = TypeVar("T")
_REQUIRED: Any = object()


class Fields:
    """A JSON object whose fields are read by name and type.

    Args:
        content: the object.
        path: the file that it was read from, for error messages.
        remedy: what the user can do if a field is wrong, for error messages.
        name: path of the object inside the file, such as ``"entries.tokens"``; empty for the whole file.

    Examples:
        >>> from torchrl_lang._files import Fields
        >>> fields = Fields({"step": "ten", "metrics": {"return": -1.5}}, "manifest.json", "delete the checkpoint")
        >>> fields.object("metrics").take("return", float)
        -1.5
        >>> fields.take("step", int)
        Traceback (most recent call last):
            ...
        torchrl_lang._files.errors.FileError: manifest.json has 'ten' as "step", expected int: delete the checkpoint.
    """

    def __init__(self, content: Mapping[str, Any], path: str | Path, remedy: str, name: str = "") -> None:
        self.content, self.path, self.remedy, self.name = content, Path(path), remedy, name

    @classmethod
    def read(cls, path: str | Path, *, remedy: str) -> Fields:
        """Read a JSON file."""
        return cls(read_json(path, remedy=remedy), path, remedy)

    @overload
    def take(self, name: str, kind: type[T]) -> T: ...
    @overload
    def take(self, name: str, kind: type[T], default: T) -> T: ...
    def take(self, name: str, kind: type[T], default: Any = _REQUIRED) -> T:
        """The field ``name``, of type ``kind``.

        An integer is accepted as a ``float``, but a boolean is never accepted as a number. Numbers must be finite.

        Args:
            name: the field.
            kind: ``int``, ``float``, ``str``, ``bool``, ``list`` or ``dict``.
            default: the value to return if the field is missing or null; without it a missing field is an error.

        Raises:
            FileError: the field is missing or of another type.
        """
        value = self.content.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if name not in self.content:
            raise self.error(f'has no field "{self._full(name)}"')
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool) or not _is_finite(value):
            raise self.error(f'has {shorten(value)} as "{self._full(name)}", expected {kind.__name__}')
        return kind(value)  # type: ignore[call-arg]

    def at_least(self, name: str, least: int) -> int:
        """The integer field ``name``, which must not be below ``least``."""
        value = self.take(name, int)
        if value < least:
            raise self.error(f'has {shorten(value)} as "{self._full(name)}", expected at least {least}')
        return value

    def object(self, name: str) -> Fields:
        """The field ``name`` as a JSON object."""
        return Fields(self.take(name, dict), self.path, self.remedy, self._full(name))

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        """The field ``name`` as a list whose items all have type ``kind``."""
        values = self.take(name, list)
        items = Fields({str(index): value for index, value in enumerate(values)}, self.path, self.remedy)
        items.name = self._full(name)
        return [items.take(index, kind) for index in items.content]

    def error(self, found: str) -> FileError:
        """The error to raise for any other mistake in the file's content."""
        return FileError(self.path, found, self.remedy)

    def _full(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    # JSON integers have any size, but a tensor holds at most 64 bits.
    return not isinstance(value, int) or -(2**63) <= value < 2**63
