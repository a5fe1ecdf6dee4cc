"""Records of JSON files: written with a digest, checked when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from torchrl_lang._files.folders import refuse_content, write_file, write_folder
from torchrl_lang._files.readers import (
    FileError,
    file_digest,
    file_errors,
    file_in,
    mistake,
    read_json,
    regular_file,
    shorten,
)

_DIGEST = "digest"
CHECKSUMS = "checksums.json"
"""Name of the file of checksums in a folder."""


def json_digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object as hexadecimal digits, independent of its formatting and of the order of its keys.

    Examples:
        >>> from torchrl_lang._files import json_digest
        >>> json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with indentation.

    Raises:
        ValueError: the content is not JSON, for instance it contains NaN.
    """
    write_file(path, json.dumps(plain_json(path, content), indent=2, ensure_ascii=False) + "\n")


def write_manifest(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with indentation and a field ``digest`` over all other fields.

    Raises:
        ValueError: the content is not JSON, for instance it contains NaN.
    """
    plain = plain_json(path, content)
    write_json(path, {**plain, _DIGEST: json_digest(plain)})


def plain_json(path: str | Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The object as reading it will return it: keys become strings, tuples become lists."""
    try:
        return json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{shorten(dict(content))} cannot be written to {path} as JSON: {error}.") from error


def write_checksums(folder: str | Path) -> None:
    """Write the size and the SHA-256 of every file of a folder into its ``checksums.json``."""
    write_json(Path(folder) / CHECKSUMS, {"files": _digests(folder)})


def folder_digest(folder: str | Path) -> str:
    """SHA-256 of the names and contents of a folder's files, as hexadecimal digits; ``checksums.json`` is left out.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torchrl_lang._files import folder_digest
        >>> with tempfile.TemporaryDirectory() as home:
        ...     _ = Path(home, "a.txt").write_text("1")
        ...     before = folder_digest(home)
        ...     _ = Path(home, "a.txt").write_text("2")
        ...     before == folder_digest(home)
        False
    """
    return json_digest(_digests(folder))


def _digests(folder: str | Path) -> dict[str, dict[str, Any]]:
    """The size and the SHA-256 of every file of a folder, those in folders inside it too, but ``checksums.json``."""
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": file_digest(path)}
        for path in paths
    }


def verify_checksums(folder: str | Path, *, remedy: str, needs: Iterable[str] = ()) -> list[str]:
    """Compare the files of a folder with its ``checksums.json``; files added later are ignored.

    Args:
        folder: holds ``checksums.json``.
        remedy: what the user can do if a file differs, for the error message.
        needs: names that ``checksums.json`` must list, with ``/`` between folders: of the files that are read.

    Returns:
        The names of the files that ``checksums.json`` lists.

    Raises:
        FileError: a file is missing or differs, or ``checksums.json`` itself is damaged or lists too few.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import verify_checksums, write_checksums
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "config.json"
        ...     _ = path.write_text('{"layers": 2}')
        ...     write_checksums(home)
        ...     _ = path.write_text('{"layers": 3}')
        ...     verify_checksums(home, remedy="save the model again")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.readers.FileError: ...config.json differs from what checksums.json records: save the ...
    """
    folder = Path(folder)
    files = _listed(folder, remedy)
    if unlisted := sorted(set(needs) - files.keys()):
        raise FileError(folder / CHECKSUMS, f"does not list {unlisted}", remedy)
    for name, found in files.items():
        path = file_in(folder, name, remedy=remedy, links=True)
        if regular_file(path, remedy).stat().st_size != found.size or file_digest(path) != found.sha256:
            raise FileError(path, f"differs from what {CHECKSUMS} records", remedy)
    return list(files)


def _listed(folder: Path, remedy: str) -> dict[str, FileChecksum]:
    """The files that ``checksums.json`` lists."""
    path = folder / CHECKSUMS
    return Checksums.parse(read_json(path, remedy=remedy), path, remedy=remedy).files


def check_replaceable(target: str | Path, manifest: str) -> None:
    """Raise unless ``target`` is missing, an empty folder, or a saved model without other files beside it.

    Args:
        target: the folder to write.
        manifest: name of the file that describes a saved model.

    Raises:
        FileExistsError: there is something else, which would be deleted.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import check_replaceable
        >>> with tempfile.TemporaryDirectory() as home:
        ...     check_replaceable(home, "model.json")
        ...     _ = (pathlib.Path(home) / "notes.txt").write_text("keep")
        ...     check_replaceable(home, "model.json")
        Traceback (most recent call last):
            ...
        FileExistsError: ... is not empty: give another folder, or delete it.
    """
    target, remedy = Path(target), "give another folder, or delete it"
    if not ((target / CHECKSUMS).exists() and (target / manifest).exists()):
        return refuse_content(target)
    kept = {CHECKSUMS, *(name.split("/")[0] for name in _listed(target, remedy))}
    if others := sorted({path.name for path in target.iterdir()} - kept):
        raise FileExistsError(f"{target} holds other files than its model, such as {others[0]}: {remedy}.")


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
        torchrl_lang._files.readers.FileError: manifest.json has 'ten' as "episodes", expected a valid integer: ...
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    FORMAT: ClassVar[str] = ""
    """Name of the kind of file; other formats are refused."""
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
            if repr(found := content.pop(name, None)) != repr(value):
                raise FileError(path, f"has {name} {shorten(found)}, but this release reads {name} {value!r}", remedy)
        if digest != json_digest({**expected, **content}):
            raise FileError(path, "was changed after it was written: its digest does not match its content", remedy)
        return cls.parse(content, path, remedy=remedy)

    @classmethod
    def parse(cls, content: Mapping[str, Any], path: str | Path, *, remedy: str) -> Self:
        """Check a JSON object that came from ``path``, without ``version`` and digest; see :meth:`read`."""
        with file_errors(path, "", remedy, ValidationError):
            return cls.model_validate_json(json.dumps(content))

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


class FileChecksum(Record):
    """Size and SHA-256 of a file."""

    size: int
    sha256: str


class Checksums(Record):
    """The content of ``checksums.json``."""

    files: dict[str, FileChecksum]


M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], content: Any, what: str) -> M:
    """Check a value of Python by its model; the ``ValueError`` of a mistake begins with ``what``."""
    try:
        return model.model_validate(dict(content) if isinstance(content, Mapping) else content)
    except ValidationError as error:
        raise ValueError(f"{what} {mistake(error)}") from None


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
