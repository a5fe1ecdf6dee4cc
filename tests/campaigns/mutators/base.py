"""What a mutator is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True)
class Mutator:
    """One way to damage a file."""

    name: str
    fits: Callable[[Path], bool]
    """Whether a file of this path can be damaged so."""
    apply: Callable[[Path, Random], str]
    """Damages the file; returns what was done, or nothing where there was nothing to do."""


def with_suffix(*suffixes: str) -> Callable[[Path], bool]:
    """True for files of these suffixes."""
    return lambda path: path.suffix in suffixes


def named(*parts: str) -> Callable[[Path], bool]:
    """True for files whose name contains one of these."""
    return lambda path: any(part in path.name for part in parts)


def digest_of(folder: Path) -> str:
    """Changes with any content, name or kind of a file below ``folder``."""
    found = []
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found.append((str(path.relative_to(folder)), path.is_symlink(), path.is_dir(), content))
    return hashlib.sha256(repr(found).encode()).hexdigest()
