"""Records on disk: JSON files whose fields are declared once, and folders of a record, further files and checksums."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from torchrl_lang._files.errors import FileError, shorten
from torchrl_lang._files.folders import refuse_content, write_folder
from torchrl_lang._files.manifests import (
    check_replaceable,
    plain_json,
    verify_checksums,
    write_checksums,
    write_manifest,
)
from torchrl_lang._files.manifests import json_digest as digest_of
from torchrl_lang._files.readers import read_json

__all__ = ["Record", "RecordFolder"]


class Record(BaseModel):
    """The content of a JSON file, checked when it is constructed and when it is read.

    A record is declared as a pydantic model. Its fields are strict (``"1"`` and ``True`` are no integers), further
    fields are refused, numbers are finite, and instances cannot be changed. Ranges are annotations such as
    ``Annotated[int, Field(ge=1)]``, alternatives are ``Literal``, and a list whose length never changes is a ``tuple``.
    Parts of a record are records, too. A check of several fields is a ``model_validator(mode="after")``; the message
    of the ``ValueError`` that it raises is put after the name of the file.

    The file has the fields of the record, ``format`` and ``version`` (unless ``FORMAT`` is empty, only ``version``),
    and ``digest``, over all others. Increase ``VERSION`` when the fields change: files of other versions are refused.

    Examples:
        >>> import tempfile
        >>> from typing import Annotated, ClassVar
        >>> from pydantic import Field
        >>> from torchrl_lang._files import Record
        >>> class Entry(Record):
        ...     dtype: str
        ...     shape: tuple[int, ...]
        >>> class Manifest(Record):
        ...     VERSION: ClassVar[int] = 2
        ...     episodes: Annotated[int, Field(ge=1)]
        ...     entries: dict[str, Entry]
        ...     seed: int | None = None
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = home + "/manifest.json"
        ...     Manifest(episodes=20, entries={"tokens": Entry(dtype="int32", shape=(20, 8))}).write(path)
        ...     manifest = Manifest.read(path, remedy="write the dataset again")
        >>> manifest.entries["tokens"].shape, manifest.seed
        ((20, 8), None)
        >>> Manifest.parse({"episodes": "ten", "entries": {}}, "manifest.json", remedy="write the dataset again")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.errors.FileError: manifest.json has 'ten' as "episodes", expected a valid integer: write ...
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    FORMAT: ClassVar[str] = ""
    """What the file describes; other formats are refused."""
    VERSION: ClassVar[int] = 1

    @classmethod
    def read(cls, path: str | Path, *, remedy: str) -> Self:
        """Read a file that :meth:`write` wrote.

        Args:
            path: the file.
            remedy: what the user can do if the file is damaged, for the error message.

        Raises:
            FileError: the file is missing or damaged, was changed after it was written, or has another version.
        """
        content = read_json(path, remedy=remedy)
        digest, expected = content.pop("digest", None), cls._head()
        for name, value in expected.items():
            if name not in content:
                raise FileError(path, f'has no field "{name}"', remedy)
            if (found := content.pop(name)) != value or type(found) is not type(value):
                reads = f"but this release reads {name} {value!r}"
                raise FileError(path, f"has {name} {shorten(found)}, {reads}", remedy)
        if digest != digest_of({**expected, **content}):
            raise FileError(path, "was changed after it was written: its digest does not match its content", remedy)
        return cls.parse(content, path, remedy=remedy)

    @classmethod
    def parse(cls, content: Mapping[str, Any], path: str | Path, *, remedy: str) -> Self:
        """Check a JSON object that came from ``path``, without ``version`` and digest; see :meth:`read`."""
        try:
            return cls.model_validate_json(json.dumps(content, allow_nan=False))
        except ValidationError as error:
            raise FileError(path, mistake(error), remedy) from None
        except ValueError as error:  # such as 1e999
            raise FileError(path, f"is not valid JSON ({error})", remedy) from error

    def write(self, path: str | Path) -> None:
        """Write the record atomically, with its digest; halves of surrogate pairs in its texts become ``?``.

        Raises:
            ValueError: a field of any type holds what is not JSON, for instance NaN.
        """
        content = plain_json(path, {**self._head(), **self.model_dump()})
        write_manifest(path, json.loads(json.dumps(content, ensure_ascii=False).encode(errors="replace")))

    @classmethod
    def _head(cls) -> dict[str, str | int]:
        return {**({"format": cls.FORMAT} if cls.FORMAT else {}), "version": cls.VERSION}


def mistake(error: ValidationError) -> str:
    """The first mistake that pydantic found, as the rest of a sentence that begins with the file."""
    first = error.errors(include_url=False)[0]
    name, found = ".".join(map(str, first["loc"])), shorten(first["input"])
    if first["type"] == "missing":
        return f'has no field "{name}"'
    if first["type"] == "extra_forbidden":
        return f'has the unknown field "{name}"'
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        return message[:1].lower() + message[1:]
    return f'has {found} as "{name}", expected {message.removeprefix("Input should be ")}'


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class RecordFolder(Generic[R]):
    """A kind of folder: a record, further files, and the checksums of all in ``checksums.json``.

    Args:
        record: the class of its record.
        config: name of the record's file.
        needs: names of the other files that are read, with ``/`` between folders.
        remedy: what the user can do about a damaged folder, for error messages.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang._files import Record, RecordFolder
        >>> class Counter(Record):
        ...     least: int
        >>> counters = RecordFolder(Counter, "counter.json", ("words.txt",), remedy="save the counter again")
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with counters.write(home, Counter(least=2)) as folder:
        ...         _ = (folder / "words.txt").write_text("a b")
        ...     counters.read(home)
        Counter(least=2)
    """

    record: type[R]
    config: str
    needs: tuple[str, ...]
    remedy: str

    @contextmanager
    def write(self, folder: str | Path, record: R, *, replace: bool = False) -> Iterator[Path]:
        """Write a folder atomically: the ``with`` block writes the other files into a temporary one.

        Args:
            folder: created if it does not exist.
            record: the content of the record's file.
            replace: whether a folder of this kind is replaced when the new one is complete.

        Raises:
            FileExistsError: the folder exists and is not empty, or with ``replace`` contains other files.
        """
        if replace:
            check_replaceable(folder, self.config)
        else:
            refuse_content(folder)
        with write_folder(folder) as target:
            yield target
            record.write(target / self.config)
            write_checksums(target)

    def read(self, folder: str | Path) -> R:
        """Check that all files are as they were written, and read the record.

        Raises:
            FileError: a file is missing or damaged, or the record has another version.
        """
        folder = Path(folder)
        verify_checksums(folder, remedy=self.remedy, needs=(self.config, *self.needs))
        return self.record.read(folder / self.config, remedy=self.remedy)
