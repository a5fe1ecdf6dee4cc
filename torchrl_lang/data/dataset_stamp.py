"""A record that a dataset's files were verified, valid until one of the files changes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from torchrl_lang.data.dataset_format import STAMP
from torchrl_lang.storage import FileError, read_json, write_file

__all__ = ["Stamp"]

_SETTLED = 2_000_000_000
"""Nanoseconds after which a change certainly changes a file's time; some file systems have a resolution of 2 s."""


class Stamp:
    """The size, times and inode of each file of a dataset at the time of construction.

    Create the stamp before the files are verified and write it afterwards. Writing, replacing or copying a file changes
    one of these numbers (programs cannot set the time of change), so the stamp no longer matches and the files are
    verified again. The stamp saves reading unchanged files; it does not protect against malicious changes.

    Args:
        folder: the dataset's folder.
        digest: digest of the manifest.
        files: the files by name.
    """

    def __init__(self, folder: Path, digest: str, files: Mapping[str, Path]) -> None:
        states = {name: path.stat() for name, path in files.items()}
        self._path = folder / STAMP
        self._settled = all(time.time_ns() - state.st_ctime_ns > _SETTLED for state in states.values())
        self._content = {
            "manifest": digest,
            "files": {
                name: [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
                for name, state in states.items()
            },
        }

    def is_there(self) -> bool:
        """Whether the current files were verified."""
        try:
            return read_json(self._path, remedy="delete it") == self._content
        except FileError:  # missing or damaged: verify
            return False

    def write(self) -> None:
        """Record that the files were verified, if the folder is writable."""
        if self._settled:
            with contextlib.suppress(OSError):  # in a read-only folder the files are verified each time
                write_file(self._path, json.dumps(self._content))
