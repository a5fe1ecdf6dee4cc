"""Errors that the user can correct, as one line for the command line."""

from __future__ import annotations

import errno
from pathlib import Path
from traceback import walk_tb
from typing import Any

__all__ = ["describe"]

_PACKAGE = Path(__file__).parents[1]
_LONGEST = 2000
"""Maximum number of characters; messages of other libraries can be long."""
_REMEDIES = {
    errno.ENOSPC: "make room on that disk and run the same command again",
    errno.EDQUOT: "make room within the quota of that disk and run the same command again",
    errno.EFBIG: "raise the limit on the size of files, or choose another disk",
    errno.EACCES: "give a folder or file that this user may use",
    errno.EPERM: "give a folder or file that this user may use",
    errno.EROFS: "give a folder on a disk that can be written",
    errno.ENOTDIR: "give a path that does not lead through a file",
    errno.EISDIR: "give a file instead of a folder",
    errno.EEXIST: "give another path, or move the old files away",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOENT: "check the path",
    errno.EMFILE: "raise the limit on open files, see `ulimit -n`",
}


def describe(error: Exception, options: Any = None) -> str | None:
    """One line about an error that the user can correct, or ``None`` where it is a bug and its traceback is needed.

    Errors of the operating system (a full disk, a missing permission) and errors that this package raises itself can be
    corrected by the user. Errors that other libraries raise are bugs.

    Args:
        error: the error.
        options: of the command; their ``out`` or ``run`` is named if the error names no file.

    Examples:
        >>> from torchrl_lang.recipes.errors import describe
        >>> describe(PermissionError(13, "Permission denied", "/runs"))
        '/runs: Permission denied; give a folder or file that this user may use.'
    """
    if isinstance(error, OSError) and error.errno is not None:
        place = error.filename or getattr(options, "out", None) or getattr(options, "run", None)
        remedy = _REMEDIES.get(error.errno)
        text = error.strerror or str(error)
        return _one_line((f"{place}: " if place else "") + text + (f"; {remedy}." if remedy else "."))
    if _is_out_of_memory(error):
        return f"out of memory ({_one_line(str(error), 200)}): give smaller batches, fewer games or a smaller model."
    of_users = isinstance(error, (ValueError, ImportError, ArithmeticError)) and _is_ours(error)
    return _one_line(str(error)) if isinstance(error, OSError) or of_users else None


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's; torch may not have been imported yet
        or (type(error) is RuntimeError and "can't allocate memory" in str(error))
    )


def _is_ours(error: Exception) -> bool:
    """Whether code of this package raised the error."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return not frames or Path(frames[-1].f_code.co_filename).is_relative_to(_PACKAGE)


def _one_line(text: str, longest: int = _LONGEST) -> str:
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}..."
