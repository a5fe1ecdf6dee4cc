"""The error that all file readers raise."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FileError", "one_line", "shorten"]


class FileError(ValueError):
    """A file is missing, damaged, or holds something other than what was expected.

    The message is one line: the file, what was found, what was expected, and the remedy.

    Args:
        path: the file or folder.
        found: what is wrong with it.
        remedy: what the user can do.

    Examples:
        >>> from torchrl_lang._files import FileError
        >>> str(FileError("data/manifest.json", "is not valid JSON", "write the dataset again"))
        'data/manifest.json is not valid JSON: write the dataset again.'
    """

    def __init__(self, path: str | Path, found: str, remedy: str) -> None:
        self.path, self.remedy = Path(path), remedy
        super().__init__(f"{path} {' '.join(found.split())}: {remedy}.")


def shorten(value: object, limit: int = 80) -> str:
    """``repr(value)`` cut to ``limit`` characters, for error messages about values of any size.

    Examples:
        >>> from torchrl_lang._files import shorten
        >>> shorten("abcdefgh", limit=6)
        "'ab..."
    """
    # Cut the value first: building the repr of ten million characters to show eighty would be slow.
    text = repr(value[:limit] if isinstance(value, (str, bytes, list, tuple)) else value)
    cut = len(text) > limit or (isinstance(value, (str, bytes, list, tuple)) and len(value) > limit)
    return text[: limit - 3] + "..." if cut else text


def one_line(error: BaseException, limit: int = 300) -> str:
    r"""The message of another library's error as one line of at most ``limit`` characters.

    Examples:
        >>> from torchrl_lang._files import one_line
        >>> one_line(ValueError("no model;\n  see the documentation"))
        'no model; see the documentation'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
