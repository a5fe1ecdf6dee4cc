"""A lock on a folder: one process works in it at a time."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["folder_lock"]


@contextmanager
def folder_lock(folder: str | Path, purpose: str = "writes", *, shown: Path | None = None) -> Iterator[Path]:
    """Hold the lock of a folder, which is made where it does not exist.

    The lock ends with the block or with the process, however that ends; it leaves no file. (On Windows nothing is
    locked, nor on a file system without locks.)

    Args:
        folder: the folder.
        purpose: what the holder does there, in the third person, for the error message.
        shown: the folder to name in the error message, by default ``folder``.

    Raises:
        FileExistsError: another holder is at work there, in this process or in another.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.storage import folder_lock
        >>> with tempfile.TemporaryDirectory() as home, folder_lock(home, "trains"):
        ...     with folder_lock(home, "trains"):
        ...         pass
        Traceback (most recent call last):
            ...
        FileExistsError: Another process trains in ...: wait until it has ended, or give another folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(folder, f"{purpose} in {shown or folder}")
    try:
        yield folder
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(folder: Path, work: str) -> int | None:
    """A descriptor that holds the folder's lock until it is closed."""
    if sys.platform == "win32":
        return None
    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        _flock(descriptor)
        # The folder may have been renamed or deleted by its former holder since it was opened.
        if folder.exists() and os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    if descriptor is not None:
        os.close(descriptor)
    raise FileExistsError(f"Another process {work}: wait until it has ended, or give another folder.")


def _flock(descriptor: int) -> None:
    """Take the lock, or raise BlockingIOError; that a network file system has no locks is no error."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
