"""A lock on a folder that one process can hold at a time."""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError


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


def temporary_prefix(target: Path) -> str:
    """Prefix of the names of unfinished copies of ``target``."""
    return f".{target.name}.writing-"


def is_unfinished(target: str | Path) -> bool:
    """Whether a process is writing ``target`` or was killed while writing it."""
    target = Path(target)
    return any(target.parent.glob(glob.escape(temporary_prefix(target)) + "*"))


def refuse_content(target: str | Path) -> None:
    """Reject a target of :func:`write_folder` in which there is something, which would be replaced.

    Raises:
        FileExistsError: the target is a file, or a folder that is not empty.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import refuse_content
        >>> with tempfile.TemporaryDirectory() as home:
        ...     refuse_content(home)
        ...     _ = (pathlib.Path(home) / "config.json").write_text("{}")
        ...     refuse_content(home)
        Traceback (most recent call last):
            ...
        FileExistsError: ... is not empty: give another folder, or delete it.
    """
    target = Path(target)
    if target.exists() and (target.is_file() or any(target.iterdir())):
        kind = "a file" if target.is_file() else "not empty"
        raise FileExistsError(f"{target} is {kind}: give another folder, or delete it.")


@contextmanager
def write_folder(target: str | Path) -> Iterator[Path]:
    """Create an empty temporary folder that becomes ``target`` when the ``with`` block succeeds.

    The files are flushed to disk before the folder is renamed. If the block fails, the folder is deleted. The next
    writer of the same target deletes what a killed process left.

    Args:
        target: the folder to create; an existing folder is replaced.

    Raises:
        FileExistsError: another process is writing this target.
        OSError: writing failed, for instance because the disk is full; the error names the target.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import write_folder
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with write_folder(pathlib.Path(home) / "model") as folder:
        ...         _ = (folder / "config.json").write_text("{}")
        ...     [path.name for path in pathlib.Path(home).iterdir()]
        ['model']
    """
    target = Path(target)
    if target.is_symlink():
        target = target.resolve()  # replace the folder that a link points to, not the link
    with named_errors(target), _temporary_folder(target) as temporary:
        yield temporary
        for path in temporary.rglob("*"):
            flush(path)
        flush(temporary)
        _replace_folder(temporary, target)


@contextmanager
def named_errors(target: Path) -> Iterator[None]:
    """Add the target's name to system errors that have none; safetensors raises its own error class for them.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang._files.folders import named_errors
        >>> with named_errors(Path("history")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
            ...
        OSError: [Errno 28] No space left on device: 'history'
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(target)) from error


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """An exclusive temporary folder to write ``target`` in, deleted at the end unless it was renamed.

    What killed writers of ``target`` left is deleted first.
    """
    with folder_lock(target.with_name(temporary_prefix(target) + "new"), "writes", shown=target) as temporary:
        own = os.stat(temporary)
        try:
            old = target.with_name(temporary_prefix(target) + "old")
            if old.exists() and not target.exists():  # its replacement was interrupted
                old.rename(target)
            leftovers = target.parent.glob(glob.escape(temporary_prefix(target)) + "*")
            for left in (*(path for path in leftovers if path != temporary), *temporary.iterdir()):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield temporary
        finally:
            # After our folder was renamed, the next writer may have created one with the same name.
            if temporary.exists() and os.path.samestat(own, os.stat(temporary)):
                shutil.rmtree(temporary, ignore_errors=True)


def write_file(target: str | Path, content: str | bytes) -> None:
    """Write one file (text as UTF-8) under a temporary name, flush it to disk, then rename it."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(temporary_prefix(target) + "file")
    # Lone surrogates cannot be written as UTF-8: write their JSON escape.
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    try:
        with named_errors(target):
            temporary.write_bytes(data)
            flush(temporary)
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(target.parent)


def _replace_folder(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; an existing folder is deleted after the rename."""
    if target.exists():
        old = target.with_name(temporary_prefix(target) + "old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        new.rename(target)
        flush(target.parent)
        shutil.rmtree(old)
    else:
        new.rename(target)
        flush(target.parent)


def remove_folder(path: Path) -> None:
    """Delete a folder or file. It is renamed first, so that no partly deleted folder is visible."""
    doomed = path.with_name(temporary_prefix(path) + uuid.uuid4().hex)
    os.replace(path, doomed)
    if doomed.is_dir():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink()


def allocate_file(path: Path, size: int) -> None:
    r"""Write a file of ``size`` zeros, at least one; a full disk is an OSError that names it.

    Without the allocation the file would be sparse, and a full disk would kill the process that maps it (SIGBUS).
    Windows and macOS do not allocate.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files.folders import allocate_file
        >>> with tempfile.TemporaryDirectory() as home:
        ...     allocate_file(pathlib.Path(home) / "rows", 3)
        ...     (pathlib.Path(home) / "rows").read_bytes()
        b'\x00\x00\x00'
    """
    if size > sys.maxsize:  # which the calls below refuse with an OverflowError
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    with named_errors(path), path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def flush(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    if os.name == "nt":  # Windows cannot flush folders or files that are open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: str | Path) -> None:
    """Delete the unfinished copies that killed processes left in ``folder``, for all targets.

    Folders that another process is writing are kept. Unfinished single files carry no lock, so no other process may be
    writing files in ``folder``.
    """
    folder = Path(folder)
    for target in {path.name[1:].partition(".writing-")[0] for path in folder.glob(".*.writing-*")}:
        with suppress(OSError), _temporary_folder(folder / target):  # locked by a writer, or read-only
            pass
