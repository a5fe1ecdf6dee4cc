"""Datasets from JSON Lines files of dialogues."""

from __future__ import annotations

import codecs
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from torchrl_lang.data.dataset_writer import DatasetWriter
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.dialogues import parse_dialogue
from torchrl_lang.data.encoded_episode import EncodedEpisode, cut_episode, encode_episode, fits, stack_episodes
from torchrl_lang.data.episodes import Episode
from torchrl_lang.data.tokenizers import Tokenizer
from torchrl_lang.functional.checks import one_of
from torchrl_lang.storage import FileError, regular_file

__all__ = ["BadLine", "dataset_from_jsonl", "read_jsonl"]

_BLOCK = 10_000
_SHOWN = 5
_REMEDY = "fix them, or leave them out with on_error='skip'"


class BadLine(NamedTuple):
    """A line that holds no valid dialogue, and the reason."""

    line: int
    """Counted from 1."""
    reason: str


def read_jsonl(
    path: str | os.PathLike[str], *, on_error: Literal["raise", "skip"] = "raise", ignore: Sequence[str] = ()
) -> tuple[list[Episode], list[BadLine]]:
    """Read a file of dialogues; see :func:`~torchrl_lang.data.parse_dialogue` for the format of a line.

    Empty lines are ignored.

    Args:
        path: the file, UTF-8, with or without a byte order mark.
        on_error: "raise" lists the first bad lines in an error; "skip" skips them, warns and returns them.
        ignore: keys of the objects to ignore.

    Returns:
        The episodes and the skipped lines.

    Raises:
        FileError: the file is missing, holds no dialogue, or holds bad lines and ``on_error`` is "raise".
    """
    path = Path(path)
    bad = _BadLines(path, on_error)
    found = [episode for number, episode in _lines(path, ignore) if bad.keeps(number, episode)]
    bad.report()
    episodes = [episode for episode in found if isinstance(episode, Episode)]
    if not episodes:
        raise _no_dialogue(path)
    return episodes, bad.lines


def dataset_from_jsonl(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer,
    row_length: int,
    *,
    on_error: Literal["raise", "skip"] = "raise",
    on_overflow: Literal["error", "truncate"] = "error",
    ignore: Sequence[str] = (),
    overwrite: bool = False,
) -> RowDataset:
    """Make a dataset from a file of dialogues of any length.

    The manifest's ``notes`` list the skipped lines with reasons and the numbers of truncated lines; a warning gives
    their counts.

    Args:
        path: the file; see :func:`~torchrl_lang.data.parse_dialogue` for the format of a line.
        folder: the folder to create.
        tokenizer: must be able to encode every text.
        row_length: ``T``.
        on_error: see :func:`read_jsonl`; a dialogue that cannot be encoded is a bad line, too.
        on_overflow: "error" treats a dialogue that does not fit as a bad line, "truncate" keeps its beginning (see
            :func:`~torchrl_lang.data.to_rows`).
        ignore: keys of the objects to ignore.
        overwrite: replace an existing dataset.

    Raises:
        FileError: the file is missing, holds no good line, or holds bad lines and ``on_error`` is "raise".
    """
    one_of("on_overflow", on_overflow, ("error", "truncate"))
    path = Path(path)
    bad, truncated, block = _BadLines(path, on_error), [], []
    writer = DatasetWriter(folder, tokenizer, row_length, source=f"dialogues of {path.name}", overwrite=overwrite)
    with writer:
        for number, found in _lines(path, ignore):
            encoded = _encode(found, tokenizer, row_length, on_overflow)
            if not bad.keeps(number, encoded) or not isinstance(encoded, EncodedEpisode):
                continue
            if not fits(encoded, row_length):
                truncated.append(number)
            block.append(cut_episode(encoded, row_length))
            if len(block) == _BLOCK:
                writer.extend(stack_episodes(block, tokenizer.control.pad, row_length))
                block.clear()
        bad.report()
        if not writer.rows and not block:
            raise _no_dialogue(path)
        writer.extend(stack_episodes(block, tokenizer.control.pad, row_length))
        writer.notes = {"skipped": [line._asdict() for line in bad.lines], "truncated_lines": truncated}
    if truncated:
        warnings.warn(
            f"{len(truncated)} dialogues of {path} are longer than row_length={row_length} tokens and were truncated; "
            f"the first is on line {truncated[0]}.",
            stacklevel=2,
        )
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


class _BadLines:
    """Collects bad lines, and raises when there are enough for the error message."""

    def __init__(self, path: Path, on_error: str) -> None:
        one_of("on_error", on_error, ("raise", "skip"))
        self.path, self.on_error, self.lines = path, on_error, list[BadLine]()

    def keeps(self, number: int, found: Episode | EncodedEpisode | str) -> bool:
        """Whether the line is good; a string is the reason why it is bad."""
        if not isinstance(found, str):
            return True
        self.lines.append(BadLine(number, found))
        if self.on_error == "raise" and len(self.lines) == _SHOWN:
            self.report()
        return False

    def report(self) -> None:
        """Raise or warn if there were bad lines."""
        if not self.lines:
            return
        shown = "; ".join(f"line {line}: {reason}" for line, reason in self.lines[:_SHOWN])
        if self.on_error == "raise":
            least = "at least " * (len(self.lines) == _SHOWN)  # reading stopped here
            raise FileError(self.path, f"holds {least}{self._count()} ({shown})", _REMEDY)
        more = "; ..." if len(self.lines) > _SHOWN else ""
        warnings.warn(f"{self._count()} of {self.path} skipped ({shown}{more}).", stacklevel=3)

    def _count(self) -> str:
        return "1 bad line" if len(self.lines) == 1 else f"{len(self.lines)} bad lines"


def _no_dialogue(path: Path) -> FileError:
    return FileError(path, "holds no dialogue", "give a file with one JSON object per line")


def _lines(path: Path, ignore: Sequence[str]) -> Iterator[tuple[int, Episode | str]]:
    """Line number and episode of each non-empty line, or the reason why the line is bad."""
    with regular_file(path, remedy="give the path of a text file with one JSON object per line").open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw.strip():
                yield number, _parse(raw, ignore)


def _parse(raw: bytes, ignore: Sequence[str]) -> Episode | str:
    """The episode of a line, or the reason why the line is bad."""
    try:
        return parse_dialogue(raw.decode("utf-8"), ignore=ignore)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start + 1} is {raw[error.start]:#04x})"
    except json.JSONDecodeError as error:
        return f"it is not JSON ({error.msg} at character {error.pos + 1})"
    except RecursionError:
        return "its JSON is nested too deeply"
    except ValueError as error:
        return str(error)


def _encode(found: Episode | str, tokenizer: Tokenizer, row_length: int, on_overflow: str) -> EncodedEpisode | str:
    if isinstance(found, str):
        return found
    try:
        encoded = encode_episode(found, tokenizer)
    except ValueError as error:
        return str(error)
    if on_overflow == "error" and not fits(encoded, row_length):
        return f"the dialogue has {len(encoded.tokens)} tokens, row_length is {row_length}"
    return encoded
