"""Write files and folders whole or not at all, whenever the process is killed."""

from __future__ import annotations

import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["remove_folder", "remove_leftovers", "replace_folder", "write_file", "write_folder"]


def temporary_prefix(target: Path) -> str:
    """How the names of unfinished copies of ``target`` begin."""
    return f".{target.name}.writing-"


@contextmanager
def write_folder(target: str | Path) -> Iterator[Path]:
    """An empty folder to write into, which becomes ``target`` when the block ends well.

    The files are flushed to the disk before the folder is renamed. When the block fails, the folder is deleted. What a
    killed process left behind is deleted by the next writer of the same target, so only one process may write a target
    at a time: hold a :func:`~torchrl_lang.storage.folder_lock` where several might.

    Args:
        target: where the folder shall be; a folder that is there already is replaced.

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
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    temporary = target.with_name(temporary_prefix(target) + uuid.uuid4().hex)
    temporary.mkdir()
    try:
        yield temporary
        flush_folder(temporary)
        replace_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_file(target: str | Path, content: str | bytes) -> None:
    """Write one file, UTF-8 where it is text: under a temporary name, flushed to the disk, then renamed."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(temporary_prefix(target) + "file")
    # Half a surrogate pair in a text is written as JSON's own escape of it.
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    try:
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
    """Delete a folder; renamed first, so that it is either whole or not there."""
    doomed = path.with_name(temporary_prefix(path) + uuid.uuid4().hex)
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


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


def remove_leftovers(folder: Path) -> None:
    """Delete every unfinished copy that killed writers left in ``folder``, whatever its target.

    Only the holder of the folder's lock may call this: it would delete what another process is writing.
    """
    for left in folder.glob(".*.writing-*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _remove_leftovers(target: Path) -> None:
    """Delete what killed writers of ``target`` left; a folder that was about to be replaced is put back."""
    old = target.with_name(temporary_prefix(target) + "old")
    if old.exists() and not target.exists():
        old.rename(target)
    for left in target.parent.glob(glob.escape(temporary_prefix(target)) + "*"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
