"""JSON files with digests: of their own content, or of all files of a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchrl_lang._files.errors import FileError, shorten
from torchrl_lang._files.fields import Fields
from torchrl_lang._files.folders import write_file
from torchrl_lang._files.readers import file_digest, file_in

__all__ = [
    "CHECKSUMS",
    "check_replaceable",
    "folder_digest",
    "json_digest",
    "read_manifest",
    "verify_checksums",
    "write_checksums",
    "write_json",
    "write_manifest",
]

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


def read_manifest(
    path: str | Path, *, remedy: str, version: int, field: str = "version", kind: str | None = None
) -> Fields:
    """Read a file that :func:`write_manifest` wrote.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.
        version: the latest version that can be read. Files of this version must have a digest, earlier ones need none.
        field: the integer field that holds the version.
        kind: the text that the field ``format`` must hold; by default it is not read.

    Returns:
        All fields except the digest.

    Raises:
        FileError: the file is damaged, is of another kind, was changed after it was written, or has a later version.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang._files import read_manifest, write_manifest
        >>> with tempfile.TemporaryDirectory() as home:
        ...     write_manifest(f"{home}/manifest.json", {"version": 1, "episodes": 20})
        ...     read_manifest(f"{home}/manifest.json", remedy="write it again", version=1).take("episodes", int)
        20
    """
    content = dict(Fields.read(path, remedy=remedy).content)
    digest = content.pop(_DIGEST, None)
    fields = Fields(content, path, remedy)
    if kind is not None and (found_kind := fields.take("format", str)) != kind:
        raise fields.error(f'has {shorten(found_kind)} as "format", expected {kind!r}')
    found = fields.at_least(field, 1)
    if found > version:
        raise fields.error(f"has version {found}, but this release reads versions up to {version}")
    if digest is None and found == version:
        raise fields.error(f'has no field "{_DIGEST}"')
    if digest is not None and digest != json_digest(content):
        raise fields.error("was changed after it was written: its digest does not match its content")
    return fields


def write_checksums(folder: str | Path) -> None:
    """Write the size and the SHA-256 of every file of a folder into its ``checksums.json``."""
    write_json(Path(folder) / CHECKSUMS, {"files": _checksums(folder)})


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
    return json_digest(_checksums(folder))


def _checksums(folder: str | Path) -> dict[str, dict[str, Any]]:
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
        torchrl_lang._files.errors.FileError: ...config.json differs from what checksums.json records: save the ...
    """
    folder = Path(folder)
    files = Fields.read(folder / CHECKSUMS, remedy=remedy).object("files")
    unlisted = sorted(set(needs) - set(files.content))
    if unlisted:
        raise FileError(folder / CHECKSUMS, f"does not list {unlisted}", remedy)
    for name in files.content:
        entry, path = files.object(name), file_in(folder, name, remedy=remedy, links=True)
        size, digest = entry.take("size", int), entry.take("sha256", str)
        if not path.is_file():
            raise FileError(path, f"is missing, but {CHECKSUMS} lists it", remedy)
        if path.stat().st_size != size or file_digest(path) != digest:
            raise FileError(path, f"differs from what {CHECKSUMS} records", remedy)
    return list(files.content)


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
        FileExistsError: ... holds files, but no model that this library saved: give another folder, or delete it.
    """
    target = Path(target)
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file: give a folder for the model.")
    found = {path.name for path in target.iterdir()}
    if not found:
        return
    remedy = "give another folder, or delete it"
    if not {CHECKSUMS, manifest} <= found:
        raise FileExistsError(f"{target} holds files, but no model that this library saved: {remedy}.")
    listed = {name.split("/")[0] for name in Fields.read(target / CHECKSUMS, remedy=remedy).object("files").content}
    others = sorted(found - listed - {CHECKSUMS})
    if others:
        raise FileExistsError(f"{target} holds other files than its model, such as {others[0]}: {remedy}.")
