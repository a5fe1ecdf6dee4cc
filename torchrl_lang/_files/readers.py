"""Read text, JSON and tensors from files that may be damaged; every failure is a :class:`FileError`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from safetensors import SafetensorError, safe_open

from torchrl_lang._files.errors import FileError, shorten

if TYPE_CHECKING:  # the command line reads its options before it needs torch
    from torch import Tensor

__all__ = [
    "TensorHeader",
    "file_digest",
    "file_in",
    "read_json",
    "read_json_list",
    "read_json_value",
    "read_tensor_headers",
    "read_tensors",
    "read_text",
    "regular_file",
    "unique_keys",
]

# Depending on the field, an edited header of a safetensors file raises any of these.
_DAMAGED_TENSORS = (SafetensorError, OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError)

MAX_TEXT_BYTES = 1 << 30
"""Larger text files are rejected unread; the files that this library writes are far smaller."""


def read_text(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    r"""Read a UTF-8 file; a byte order mark at its start is dropped.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.
        max_bytes: a larger file is rejected unread.

    Raises:
        FileError: the file is missing, not a regular file, too large, or not UTF-8.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_text
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "words.txt"
        ...     _ = path.write_bytes(b"cr\xe2ne")
        ...     read_text(path, remedy="save it as UTF-8")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.errors.FileError: ... is not UTF-8 text (byte 2 is 0xe2): save it as UTF-8.
    """
    path = regular_file(path, remedy)
    size = path.stat().st_size
    if size > max_bytes:
        raise FileError(path, f"has {size} bytes, more than the limit of {max_bytes}", remedy)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", remedy) from error
    except UnicodeDecodeError as error:
        found = f"is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
        raise FileError(path, found, remedy) from error


def read_json(path: str | Path, *, remedy: str) -> dict[str, Any]:
    """Read a JSON object.

    Constants that are not JSON (``NaN``, ``Infinity``) and repeated keys are errors.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.

    Raises:
        FileError: the file cannot be read as text, or its content is not a JSON object.
    """
    content = _parse_json(path, read_text(path, remedy=remedy), remedy)
    if not isinstance(content, dict):
        raise FileError(path, f"holds {shorten(content)}, not a JSON object", remedy)
    return content


def read_json_list(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> list[Any]:
    """Read a JSON list, with the checks of :func:`read_json`.

    Args:
        path: the file.
        remedy: what the user can do if the file cannot be read, for the error message.
        max_bytes: a larger file is rejected unread.

    Raises:
        FileError: the file cannot be read as text, or its content is not a JSON list.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_json_list
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "rewards.json"
        ...     _ = path.write_text("[0.5, 0.25]")
        ...     read_json_list(path, remedy="download it again")
        [0.5, 0.25]
    """
    content = read_json_value(path, remedy=remedy, max_bytes=max_bytes)
    if not isinstance(content, list):
        raise FileError(path, f"holds {shorten(content)}, not a JSON list", remedy)
    return content


def read_json_value(path: str | Path, *, remedy: str, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Read JSON of any kind, with the arguments and checks of :func:`read_json_list`.

    Raises:
        FileError: the file cannot be read as text or is not JSON.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang._files import read_json_value
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "rewards.json"
        ...     _ = path.write_text("{}")
        ...     read_json_value(path, remedy="download it again")
        {}
    """
    return _parse_json(path, read_text(path, remedy=remedy, max_bytes=max_bytes), remedy)


def _parse_json(path: str | Path, text: str, remedy: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant, parse_int=_int)
    except (ValueError, RecursionError) as error:
        raise FileError(path, f"is not valid JSON ({error})", remedy) from error


def read_tensors(path: str | Path, *, remedy: str) -> dict[str, Tensor]:
    """Read a safetensors file onto the CPU.

    Raises:
        FileError: the file is missing or damaged.
    """
    from safetensors.torch import load_file  # with torch

    path = regular_file(path, remedy)
    try:
        return load_file(path)
    except _DAMAGED_TENSORS as error:
        raise FileError(path, f"is not a complete safetensors file ({error})", remedy) from error


class TensorHeader(NamedTuple):
    """The dtype (``"F32"``, ``"BF16"``, ``"I64"``) and shape of a tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


def read_tensor_headers(path: str | Path, *, remedy: str) -> dict[str, TensorHeader]:
    """Read the names, dtypes and shapes of the tensors in a safetensors file, but not the tensors.

    Raises:
        FileError: the file is missing or damaged.
    """
    path = regular_file(path, remedy)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {name: TensorHeader(each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except _DAMAGED_TENSORS as error:
        raise FileError(path, f"is not a complete safetensors file ({error})", remedy) from error


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_in(folder: str | Path, name: object, *, remedy: str, links: bool = False) -> Path:
    """The path of a file that a manifest lists, which must lie inside ``folder``.

    Args:
        folder: the folder of the manifest.
        name: the name in the manifest: a relative path with ``/`` between its parts.
        remedy: what the user can do, for the error message.
        links: accept symbolic links out of the folder, as in the Hugging Face cache.

    Raises:
        FileError: ``name`` is not a relative path, or leads out of the folder (``..`` or a symbolic link).

    Examples:
        >>> from torchrl_lang._files import file_in
        >>> file_in("data", "../../etc/passwd", remedy="write the dataset again")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.errors.FileError: data names the file '../../etc/passwd', which lies outside of it: ...
    """
    folder = Path(folder)
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        raise FileError(folder, f"names the file {shorten(name)}, which is not a valid file name", remedy)
    parts = PurePosixPath(name)
    path = folder / parts
    try:
        inside = links or path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError) as error:  # a link to itself
        raise FileError(folder, f"names the file {shorten(name)}, which cannot be found ({error})", remedy) from error
    if parts.is_absolute() or ".." in parts.parts or not inside:
        raise FileError(folder, f"names the file {shorten(name)}, which lies outside of it", remedy)
    return path


def regular_file(path: str | Path, remedy: str) -> Path:
    """``path``, if it is a regular file. (Reading a pipe or a device could block forever.)

    Raises:
        FileError: ``path`` is missing or not a regular file.
    """
    path = Path(path)
    try:
        regular, exists = path.is_file(), path.exists()
    except (OSError, ValueError) as error:
        raise FileError(path, f"cannot be read ({error})", remedy) from error
    if not regular:
        raise FileError(path, "is not a regular file" if exists else "is missing", remedy)
    return path


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` for JSON readers that raises ValueError if a key is repeated."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {shorten(key)} is repeated in one object")
        content[key] = value
    return content


def _int(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{shorten(number)} has more than 64 bits")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
