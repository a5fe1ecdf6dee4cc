"""Datasets from dialogues in JSON Lines files or any other records, with an error for every mistake."""

from __future__ import annotations

import codecs
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torchrl_lang.data.dataset_writer import DatasetWriter
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.dialogue_records import DialogueReader, parse_object
from torchrl_lang.data.encoded_episode import EncodedEpisode, cut_episode, encode_episode, fits, stack_episodes
from torchrl_lang.data.episodes import Episode
from torchrl_lang.data.tokenizers import Tokenizer
from torchrl_lang.functional.checks import one_of
from torchrl_lang.storage import FileError, regular_file

__all__ = ["BadLine", "dataset_from_jsonl", "dataset_from_records", "read_jsonl"]

T = TypeVar("T")

_BLOCK = 10_000
_SHOWN = 5
_REMEDY = "fix them, or leave them out with on_error='skip'"
_READER = DialogueReader()


class BadLine(NamedTuple):
    """A line that holds no valid dialogue, and the reason."""

    line: int
    """Counted from 1."""
    reason: str


def read_jsonl(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
    ignore: Sequence[str] = (),
) -> tuple[list[Episode], list[BadLine]]:
    """Read a file of dialogues.

    Empty lines are ignored.

    Args:
        path: the file, UTF-8, with or without a byte order mark, with one JSON object per line.
        tokenizer: that of the rows; needed for calls of tools.
        reader: reads a line's object: its form, and where rewards come from.
        on_error: "raise" lists the first bad lines in an error; "skip" skips them, warns and returns them.
        ignore: keys of the objects to ignore, beside those that ``reader`` ignores.

    Returns:
        The episodes and the skipped lines.

    Raises:
        FileError: the file is missing, holds no dialogue, or holds bad lines and ``on_error`` is "raise".
    """
    source, bad = _File(Path(path)), list[BadLine]()
    read = replace(reader, ignore=(*reader.ignore, *ignore))
    good = _good(source, lambda line: read(parse_object(line), tokenizer), on_error, bad)
    episodes = [episode for _, every in good for episode in every]
    if not episodes:
        raise source.error("holds no dialogue", source.no_dialogue)
    return episodes, bad


def dataset_from_jsonl(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer,
    row_length: int,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
    on_overflow: Literal["error", "truncate"] = "error",
    ignore: Sequence[str] = (),
    overwrite: bool = False,
) -> RowDataset:
    """Make a dataset from a file of dialogues of any length.

    The manifest's ``notes`` list the skipped lines with reasons and the numbers of truncated lines; a warning gives
    their counts.

    Args:
        path: the file, UTF-8, with one JSON object per line.
        folder: the folder to create.
        tokenizer: must be able to encode every text.
        row_length: ``T``.
        reader: reads a line's object: its form, and where rewards come from.
        on_error: see :func:`read_jsonl`; a dialogue that cannot be encoded is a bad line, too.
        on_overflow: "error" treats a dialogue that does not fit as a bad line, "truncate" keeps its beginning (see
            :func:`~torchrl_lang.data.to_rows`).
        ignore: keys of the objects to ignore, beside those that ``reader`` ignores.
        overwrite: replace an existing dataset.

    Raises:
        FileError: the file is missing, holds no good line, or holds bad lines and ``on_error`` is "raise".
    """
    read = replace(reader, ignore=(*reader.ignore, *ignore))
    writer = DatasetWriter(folder, tokenizer, row_length, source=f"dialogues of {Path(path).name}", overwrite=overwrite)
    _write(writer, _File(Path(path)), lambda line: read(parse_object(line), tokenizer), on_error, on_overflow)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


def dataset_from_records(
    records: Iterable[Mapping[str, Any]],
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer,
    row_length: int,
    *,
    reader: DialogueReader = _READER,
    on_error: Literal["raise", "skip"] = "raise",
    on_overflow: Literal["error", "truncate"] = "error",
    overwrite: bool = False,
    source: str = "records",
) -> RowDataset:
    """Make a dataset from records of dialogues, such as a Hugging Face dataset, streamed or in memory.

    The manifest's ``notes`` list the skipped records with reasons and the numbers of truncated ones, counted from 1.

    Args:
        records: mappings, read once.
        folder: the folder to create.
        tokenizer: must be able to encode every text.
        row_length: ``T``.
        reader: reads a record: its form, and where rewards come from.
        on_error: as in :func:`dataset_from_jsonl`.
        on_overflow: as in :func:`dataset_from_jsonl`.
        overwrite: replace an existing dataset.
        source: where the records come from, recorded in the manifest.

    Raises:
        ValueError: there is no good record, or there are bad records and ``on_error`` is "raise".

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import CharTokenizer, DialogueReader, dataset_from_records
        >>> records = [{"prompt": "ab", "completion": "c", "label": True}]  # a dataset of TRL's
        >>> tokenizer, reader = CharTokenizer.from_alphabet("abc"), DialogueReader(reward="label")
        >>> with tempfile.TemporaryDirectory() as home:
        ...     dataset = dataset_from_records(records, home + "/data", tokenizer, 12, reader=reader)
        ...     print(dataset.episode(0))
        Episode(turns=(Turn(text='ab', ...), Turn(text='c', reward=1.0, ...)), terminated=True, ...)
    """
    writer = DatasetWriter(folder, tokenizer, row_length, source=source, overwrite=overwrite)
    _write(writer, _Records(records), lambda record: reader(record, tokenizer), on_error, on_overflow)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


# -- where dialogues come from -----------------------------------------------------------------------------------------


class _File:
    """The lines of a file, as bytes."""

    item, no_dialogue = "line", "give a file with one JSON object per line"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        remedy = "give the path of a text file with one JSON object per line"
        with regular_file(self.path, remedy=remedy).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
                if line.strip():
                    yield number, line

    def error(self, what: str, remedy: str) -> FileError:
        return FileError(self.path, what, remedy)


class _Records:
    """Mappings from Python."""

    item, no_dialogue = "record", "give at least one record"

    def __init__(self, records: Iterable[Any]) -> None:
        self.records = records

    def __str__(self) -> str:
        return "the records"

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return iter(enumerate(self.records, start=1))

    def error(self, what: str, remedy: str) -> ValueError:
        return ValueError(f"The iterable {what}: {remedy}.")


def _good(
    source: _File | _Records, convert: Callable[[Any], T], on_error: str, bad: list[BadLine]
) -> Iterator[tuple[int, T]]:
    """Number and value of each item that ``convert`` accepts; collects the others, and raises or warns at the end."""
    one_of("on_error", on_error, ("raise", "skip"))
    for number, item in source:
        try:
            value = convert(item.decode("utf-8") if isinstance(item, bytes) else item)
        except (ValueError, RecursionError) as error:
            bad.append(BadLine(number, _reason(error)))
            if on_error == "raise" and len(bad) == _SHOWN:
                break
        else:
            yield number, value
    if not bad:
        return
    shown = "; ".join(f"{source.item} {line}: {reason}" for line, reason in bad[:_SHOWN])
    count = f"{len(bad)} bad {source.item}{'s' * (len(bad) > 1)}"
    if on_error == "raise":
        least = "at least " * (len(bad) == _SHOWN)  # reading stopped here
        raise source.error(f"holds {least}{count} ({shown})", _REMEDY)
    more = "; ..." if len(bad) > _SHOWN else ""
    warnings.warn(f"{count} of {source} skipped ({shown}{more}).", stacklevel=4)


def _reason(error: ValueError | RecursionError) -> str:
    """Why an item is bad."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.start + 1} is {error.object[error.start]:#04x})"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg} at character {error.pos + 1})"
    return "its JSON is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _write(
    writer: DatasetWriter,
    source: _File | _Records,
    read: Callable[[Any], list[Episode]],
    on_error: str,
    on_overflow: str,
) -> None:
    """Write the episodes of all items."""
    one_of("on_overflow", on_overflow, ("error", "truncate"))
    bad, truncated, block = list[BadLine](), list[int](), list[EncodedEpisode]()
    row_length, pad = writer.row_length, writer.tokenizer.control.pad

    def encode(item: Any) -> list[EncodedEpisode]:
        every = [encode_episode(episode, writer.tokenizer) for episode in read(item)]
        for encoded in every:
            if on_overflow == "error" and not fits(encoded, row_length):
                raise ValueError(f"the dialogue has {len(encoded.tokens)} tokens, row_length is {row_length}")
        return every

    with writer:
        for number, every in _good(source, encode, on_error, bad):
            if not all(fits(encoded, row_length) for encoded in every):
                truncated.append(number)
            block += [cut_episode(encoded, row_length) for encoded in every]
            if len(block) >= _BLOCK:
                writer.extend(stack_episodes(block, pad, row_length))
                block.clear()
        if not writer.rows and not block:
            raise source.error("holds no dialogue", source.no_dialogue)
        writer.extend(stack_episodes(block, pad, row_length))
        writer.notes = {
            "skipped": [line._asdict() for line in bad],
            f"truncated_{source.item}s": truncated,
        }
    if truncated:
        warnings.warn(
            f"{len(truncated)} dialogues of {source} are longer than row_length={row_length} tokens and were "
            f"truncated; the first is {'on ' * (source.item == 'line')}{source.item} {truncated[0]}.",
            stacklevel=3,
        )
