"""Rewards that are stored in a file by model and text."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang._files import FileError, one_line, shorten
from torchrl_lang.envs.reddit.text_reward import TextReward, rewards_of

__all__ = ["CachedReward"]

_TABLE = (
    "CREATE TABLE IF NOT EXISTS rewards (model TEXT NOT NULL, text BLOB NOT NULL, value REAL NOT NULL, "
    "PRIMARY KEY (model, text)) WITHOUT ROWID"
)
_PATIENCE = 60.0
"""Seconds to wait for another process that writes."""
_UNUSABLE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
}
"""Errors in which the file's content, which may have been paid for, is as it was."""
_REMEDY = "give another file, or delete it: its rewards are then computed again"


class CachedReward:
    """A reward that scores each text once and stores the value in an SQLite file.

    Values are found by the model's name and the text. Several processes may share the file: what one has stored the
    others find, and if two have scored the same text, both return the value that was stored first. A part of the texts
    is stored once it is scored, so a call that was interrupted loses one part at most.

    Args:
        reward: scores the texts that are not stored. It must return the same value for the same text, so
            :class:`Noised` belongs around the cache, not inside.
        path: the file; it is created if it is missing, and its folder too.
        model: name of the reward and its options; another name has other values in the same file.
        batch_size: texts to score and store at a time.

    Raises:
        FileError: the file is no such cache, or cannot be read or written now.
        ValueError: the reward returns a number that is not finite, or another number of them.

    Examples:
        >>> import tempfile, torch
        >>> from torchrl_lang.envs.reddit.rewards import CachedReward
        >>> def lengths(texts):
        ...     print("scored", texts)
        ...     return torch.tensor([float(len(text)) for text in texts])
        >>> with tempfile.TemporaryDirectory() as home:
        ...     reward = CachedReward(lengths, home + "/rewards.sqlite", model="lengths")
        ...     reward(["a", "bcd", "a"]), reward(["bcd"])
        scored ['a', 'bcd']
        (tensor([1., 3., 1.]), tensor([3.]))
    """

    def __init__(self, reward: TextReward, path: str | Path, *, model: str, batch_size: int = 1024) -> None:
        at_least_one("batch_size", batch_size)
        if not model:
            raise ValueError("CachedReward needs a name of its model: values are stored under it.")
        self.reward, self.path, self.model, self.batch_size = reward, Path(path), model, batch_size
        with self._open():
            pass  # so that a wrong file is an error now

    def __call__(self, texts: list[str]) -> Tensor:
        """The rewards of texts, float32 ``[N]``."""
        different = list(dict.fromkeys(texts))
        with self._open() as file:
            found = self._find(file, different)
        missing = [text for text in different if text not in found]
        for first in range(0, len(missing), self.batch_size):
            part = missing[first : first + self.batch_size]
            values = rewards_of(self.reward, part).tolist()
            rows = [(self.model, _key(text), value) for text, value in zip(part, values, strict=True)]
            with self._open() as file:
                file.executemany("INSERT OR IGNORE INTO rewards VALUES (?, ?, ?)", rows)
                found |= self._find(file, part)
        return torch.tensor([found[text] for text in texts], dtype=torch.float32)

    def _find(self, file: sqlite3.Connection, texts: Sequence[str]) -> dict[str, float]:
        query = "SELECT value FROM rewards WHERE model = ? AND text = ?"
        rows = {text: file.execute(query, (self.model, _key(text))).fetchone() for text in texts}
        found = {text: row[0] for text, row in rows.items() if row is not None}
        for text, value in found.items():
            if not isinstance(value, float) or not math.isfinite(value):
                problem = f"has {shorten(value)} as the reward of {shorten(text)}, expected a finite number"
                raise FileError(self.path, problem, _REMEDY)
        return found

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection of this call alone, so that forks and pickles of this object work; commits at the end."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=_PATIENCE)) as file, file:
                file.execute(_TABLE)  # the file may have been deleted since the last call
                yield file
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "sqlite_errorcode", 0)  # the low byte is the kind, the others are details
            if isinstance(error, OSError) or code & 0xFF in _UNUSABLE:
                raise FileError(
                    self.path, f"cannot be used ({one_line(error)})", "try again, or give another file"
                ) from error
            raise FileError(self.path, f"is no cache of rewards ({one_line(error)})", _REMEDY) from error


def _key(text: str) -> bytes:
    """A blob, because texts of an agent may hold NUL characters and lone surrogates."""
    return text.encode("utf-8", "surrogatepass")
