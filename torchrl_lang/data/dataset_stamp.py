"""A note beside a data set that its files were verified, which holds until one of them is touched."""

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
"""Nanoseconds after which a change is sure to give a file another time: some file systems count in steps of 2 s."""


class Stamp:
    """The files of a data set as they are at this moment: size, times and inode of each.

    Take it before the files are verified and write it after. A file that is written, replaced or copied changes one of
    these numbers, its time of change at least, which no program can set back; then the stamp no longer fits and the
    files are verified again. It is a short cut past reading unchanged files, no protection against malice.

    Args:
        folder: the data set's.
        digest: of the manifest.
        files: the files, by name.
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
        """Whether the files were verified as they are now."""
        try:
            return read_json(self._path, remedy="delete it") == self._content
        except FileError:  # missing or damaged: verify
            return False

    def write(self) -> None:
        """Note that the files were verified, where that can be noted."""
        if self._settled:
            with contextlib.suppress(OSError):  # a folder that may only be read is verified each time
                write_file(self._path, json.dumps(self._content))
