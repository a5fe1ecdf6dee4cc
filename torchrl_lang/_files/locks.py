"""A lock on a folder that one process can hold at a time."""

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
    """Hold the lock of a folder, which is created if it does not exist.

    The lock is released at the end of the ``with`` block or when the process ends, and leaves no file. Windows and file
    systems without locks do not lock.

    Args:
        folder: the folder.
        purpose: what the holder does in the folder, as a verb in the third person, for the error message.
        shown: the folder to name in the error message; default ``folder``.

    Raises:
        FileExistsError: this process or another one holds the lock already.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang._files import folder_lock
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
        # The previous holder may have renamed or deleted the folder since we opened it.
        if folder.exists() and os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    if descriptor is not None:
        os.close(descriptor)
    raise FileExistsError(f"Another process {work}: wait until it has ended, or give another folder.")


def _flock(descriptor: int) -> None:
    """Take the lock or raise BlockingIOError; file systems without locks raise no error."""
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
