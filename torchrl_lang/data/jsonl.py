"""Datasets from dialogues in JSON Lines files or any other records, with an error for every mistake."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torchrl_lang._checks import one_of
from torchrl_lang.data.dataset_writer import DatasetWriter
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.dialogue_records import DialogueReader, parse_object
from torchrl_lang.data.json_lines import BadLine, LineFile, Records, good_items
from torchrl_lang.text.encoded_episode import EncodedEpisode, cut_episode, encode_episode, fits, stack_episodes
from torchrl_lang.text.episodes import Episode
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["BadLine", "dataset_from_jsonl", "dataset_from_records", "read_jsonl"]

_BLOCK = 10_000
_READER = DialogueReader()


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
    source, bad = LineFile(Path(path)), list[BadLine]()
    read = replace(reader, ignore=(*reader.ignore, *ignore))
    good = good_items(source, lambda line: read(parse_object(line), tokenizer), on_error, bad)
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
            :func:`~torchrl_lang.text.to_rows`).
        ignore: keys of the objects to ignore, beside those that ``reader`` ignores.
        overwrite: replace an existing dataset.

    Raises:
        FileError: the file is missing, holds no good line, or holds bad lines and ``on_error`` is "raise".
    """
    read = replace(reader, ignore=(*reader.ignore, *ignore))
    writer = DatasetWriter(folder, tokenizer, row_length, source=f"dialogues of {Path(path).name}", overwrite=overwrite)
    _write(writer, LineFile(Path(path)), lambda line: read(parse_object(line), tokenizer), on_error, on_overflow)
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
        >>> from torchrl_lang.data import DialogueReader, dataset_from_records
        >>> from torchrl_lang.text import CharTokenizer
        >>> records = [{"prompt": "ab", "completion": "c", "label": True}]  # a dataset of TRL's
        >>> tokenizer, reader = CharTokenizer.from_alphabet("abc"), DialogueReader(reward="label")
        >>> with tempfile.TemporaryDirectory() as home:
        ...     dataset = dataset_from_records(records, home + "/data", tokenizer, 12, reader=reader)
        ...     print(dataset.episode(0))
        Episode(turns=(Turn(text='ab', ...), Turn(text='c', reward=1.0, ...)), terminated=True, ...)
    """
    writer = DatasetWriter(folder, tokenizer, row_length, source=source, overwrite=overwrite)
    _write(writer, Records(records), lambda record: reader(record, tokenizer), on_error, on_overflow)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)


def _write(
    writer: DatasetWriter,
    source: LineFile | Records,
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
        for number, every in good_items(source, encode, on_error, bad):
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
