"""Check game files before the engine opens them, because it hangs or crashes on damaged ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from torchrl_lang._files import FileError, read_json

__all__ = ["REMEDY", "check_game_file", "game_files"]

REMEDY = "delete it and build the game again with build_games(specs)"
_HEADER = 64
"""Bytes of the header of a Z-machine file (Z-Machine Standard 1.1, section 11)."""


def game_files(games: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The absolute paths of games, each checked.

    Raises:
        ValueError: ``games`` is a single path instead of a sequence, or empty.
        FileNotFoundError: a file is missing.
        FileError: a file or the ``.json`` beside it is damaged.
    """
    if isinstance(games, str | os.PathLike):
        raise ValueError(f"games must be a sequence of files, got one path: pass [{os.fspath(games)!r}].")
    files = tuple(os.path.abspath(path) for path in games)
    if not files:
        raise ValueError("A TextWorldEnv needs at least one game: build some with build_games(specs).")
    for path in dict.fromkeys(files):
        check_game_file(path)
    return files


def check_game_file(path: str | os.PathLike[str]) -> None:
    """Raise unless a game is complete: a Z-machine file whose checksum matches its header, with its ``.json``."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}: build games with build_games(specs).")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror})", REMEDY) from error
    if len(content) < _HEADER or content[0] != 8:
        raise FileError(path, "is not a game of the Z-machine, version 8, which the engine plays", REMEDY)
    length = 8 * int.from_bytes(content[0x1A:0x1C], "big")
    if len(content) < length:
        raise FileError(path, f"has {len(content)} of {length} bytes", REMEDY)
    body = bytearray(content[_HEADER:length])
    found = int(torch.frombuffer(body, dtype=torch.uint8).sum()) % 2**16 if body else 0
    if found != int.from_bytes(content[0x1C:0x1E], "big"):
        raise FileError(path, "is damaged (its checksum differs)", REMEDY)
    read_json(path.with_suffix(".json"), remedy=f"delete {path} and build the game again with build_games(specs)")
