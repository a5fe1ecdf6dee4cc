"""Checksums of all files of a folder, stored in one file of that folder."""

from __future__ import annotations

import json
from pathlib import Path

from torchrl_lang.storage.errors import FileError
from torchrl_lang.storage.fields import Fields
from torchrl_lang.storage.folders import write_file
from torchrl_lang.storage.readers import file_digest, file_in

__all__ = ["CHECKSUMS", "verify_checksums", "write_checksums"]

CHECKSUMS = "checksums.json"
"""Name of the file."""


def write_checksums(folder: str | Path) -> None:
    """Write the size and the SHA-256 of every file of a folder into its ``checksums.json``."""
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": file_digest(path)}
        for path in paths
    }
    write_file(folder / CHECKSUMS, json.dumps({"files": files}, indent=2) + "\n")


def verify_checksums(folder: str | Path, *, remedy: str) -> list[str]:
    """Compare the files of a folder with its ``checksums.json``; files added later are ignored.

    Args:
        folder: holds ``checksums.json``.
        remedy: what the user can do if a file differs, for the error message.

    Returns:
        The names of the files that ``checksums.json`` lists.

    Raises:
        FileError: a file is missing or differs, or ``checksums.json`` itself is damaged.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.storage import verify_checksums, write_checksums
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "config.json"
        ...     _ = path.write_text('{"layers": 2}')
        ...     write_checksums(home)
        ...     _ = path.write_text('{"layers": 3}')
        ...     verify_checksums(home, remedy="save the model again")
        Traceback (most recent call last):
            ...
        torchrl_lang.storage.errors.FileError: ...config.json differs from what checksums.json records: save the ...
    """
    folder = Path(folder)
    files = Fields.read(folder / CHECKSUMS, remedy=remedy).object("files")
    for name in files.content:
        entry, path = files.object(name), file_in(folder, name, remedy=remedy, links=True)
        size, digest = entry.take("size", int), entry.take("sha256", str)
        if not path.is_file():
            raise FileError(path, f"is missing, but {CHECKSUMS} lists it", remedy)
        if path.stat().st_size != size or file_digest(path) != digest:
            raise FileError(path, f"differs from what {CHECKSUMS} records", remedy)
    return list(files.content)
