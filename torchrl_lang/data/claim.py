"""A folder in which one writer at a time is at work."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["claimed"]


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """An empty folder that is nobody else's while the block lasts; gone after it unless it was moved away.

    What a writer that was killed left there is removed: its claim fell with it. (On Windows nothing is locked.)

    Raises:
        FileExistsError: another writer is at work there, in this process or in another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = _lock(folder)
    try:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield folder
    finally:
        if _is_at(mark, folder):
            shutil.rmtree(folder, ignore_errors=True)
        if mark is not None:
            os.close(mark)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed."""
    if sys.platform == "win32":
        return None
    import fcntl

    mark = None
    try:
        mark = os.open(folder, os.O_RDONLY)
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(mark, folder):  # else it was finished and moved away in between
            return mark
    except OSError:
        pass
    if mark is not None:
        os.close(mark)
    raise FileExistsError(f"Another writer is at work in {folder}: wait until it is done, or give another folder.")


def _is_at(mark: int | None, folder: Path) -> bool:
    """Whether the folder with this descriptor still stands at its path."""
    if mark is None or not folder.exists():
        return folder.exists()
    return os.path.samestat(os.fstat(mark), os.stat(folder))
