"""Write files and folders whole or not at all, whenever the process is killed."""

from __future__ import annotations

import glob
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from torchrl_lang.storage.locks import folder_lock

__all__ = ["is_unfinished", "remove_folder", "remove_leftovers", "replace_folder", "write_file", "write_folder"]


def temporary_prefix(target: Path) -> str:
    """How the names of unfinished copies of ``target`` begin."""
    return f".{target.name}.writing-"


def is_unfinished(target: str | Path) -> bool:
    """Whether a writer of ``target`` is at work, or was killed."""
    target = Path(target)
    return any(target.parent.glob(glob.escape(temporary_prefix(target)) + "*"))


@contextmanager
def write_folder(target: str | Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``target`` when the block ends well.

    The files are flushed to the disk before the folder is renamed. When the block fails, the folder is deleted. What a
    killed process left behind is deleted by the next writer of the same target.

    Args:
        target: where the folder shall be; a folder that is there already is replaced.

    Raises:
        FileExistsError: another process writes this target.
        OSError: the disk is full, for instance; with the target's name.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.storage import write_folder
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with write_folder(pathlib.Path(home) / "model") as folder:
        ...         _ = (folder / "config.json").write_text("{}")
        ...     [path.name for path in pathlib.Path(home).iterdir()]
        ['model']
    """
    target = Path(target)
    if target.is_symlink():
        target = target.resolve()  # what it points to is replaced, not the link
    with _named_errors(target), _temporary_folder(target) as temporary:
        yield temporary
        flush_folder(temporary)
        replace_folder(temporary, target)


@contextmanager
def _named_errors(target: Path) -> Iterator[None]:
    """Give the system's errors the target's name where they have none; safetensors has an error of its own for them."""
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
    """The folder in which ``target`` is written: empty, locked, and deleted at the end unless it was renamed."""
    with folder_lock(target.with_name(temporary_prefix(target) + "new"), "writes", shown=target) as temporary:
        own = os.stat(temporary)
        try:
            _remove_leftovers(target, temporary)
            yield temporary
        finally:
            # Once ours is renamed, the next writer may have made a folder of that name.
            if temporary.exists() and os.path.samestat(own, os.stat(temporary)):
                shutil.rmtree(temporary, ignore_errors=True)


def write_file(target: str | Path, content: str | bytes) -> None:
    """Write one file, UTF-8 where it is text: under a temporary name, flushed to the disk, then renamed."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(temporary_prefix(target) + "file")
    # Half a surrogate pair in a text is written as JSON's own escape of it.
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    try:
        with _named_errors(target):
            temporary.write_bytes(data)
            flush(temporary)
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(target.parent)


def replace_folder(new: Path, target: Path) -> None:
    """Rename ``new`` to ``target``; a folder that is there is deleted only after it is replaced."""
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
    """Delete a folder, or a file in its place; renamed first, so that it is either whole or not there."""
    doomed = path.with_name(temporary_prefix(path) + uuid.uuid4().hex)
    os.replace(path, doomed)
    if doomed.is_dir():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink()


def flush_folder(folder: Path) -> None:
    """Wait until all files below ``folder``, and their names, are on the disk."""
    for path in folder.rglob("*"):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if os.name == "nt":  # flushes neither folders nor files that are open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: str | Path) -> None:
    """Delete the unfinished copies that killed writers left in ``folder``, whatever their targets.

    Folders that are being written at this moment stay; of files nobody can tell, so no other process may be writing
    files there.
    """
    folder = Path(folder)
    for target in {path.name[1:].partition(".writing-")[0] for path in folder.glob(".*.writing-*")}:
        with suppress(OSError), _temporary_folder(folder / target):  # where it is locked, or may only be read
            pass


def _remove_leftovers(target: Path, temporary: Path) -> None:
    """Delete what killed writers of ``target`` left; a folder that was about to be replaced is put back."""
    old = target.with_name(temporary_prefix(target) + "old")
    if old.exists() and not target.exists():
        old.rename(target)
    others = (path for path in target.parent.glob(glob.escape(temporary_prefix(target)) + "*") if path != temporary)
    for left in (*others, *temporary.iterdir()):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
