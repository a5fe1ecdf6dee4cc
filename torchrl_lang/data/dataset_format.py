"""The files of a dataset's folder: their names, dtypes and shapes, and the manifest that describes them."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tensordict import MemoryMappedTensor, TensorDict

from torchrl_lang._files import Fields, is_unfinished, read_manifest, shorten
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED

__all__ = [
    "DISK_DTYPES",
    "FURTHER_DTYPES",
    "FORMAT",
    "DiskEntry",
    "MANIFEST",
    "META",
    "REMEDY",
    "ROWS",
    "STAMP",
    "TOKENIZER",
    "VERSION",
    "described_entry",
    "dtype_name",
    "entries_of",
    "entry_file",
    "further_entry",
    "map_rows",
    "read_dataset_manifest",
    "row_entries",
]

FORMAT, VERSION = "torchrl_lang rows", 2
"""Version 2 added ``digest``, over the manifest, and ``files``, the checksums of the other JSON files."""

MANIFEST, TOKENIZER, ROWS, STAMP = "manifest.json", "tokenizer.json", "rows", ".verified.json"
META = f"{ROWS}/meta.json"
"""File that tensordict needs to open the rows without this library; this library does not read it."""

REMEDY = "the dataset is damaged, generate it again"

DISK_DTYPES = {
    TOKENS: torch.int32,
    ATTENTION_MASK: torch.bool,
    AGENT_MASK: torch.bool,
    TOKEN_REWARD: torch.float32,
    TERMINATED: torch.bool,
    TRUNCATED: torch.bool,
}
"""The entries that every dataset has, and their dtypes on disk."""

FURTHER_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bool, torch.int64, torch.float32)}
"""The dtypes of further entries, by their name in the manifest."""


class DiskEntry(NamedTuple):
    """How an entry is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the entry of one row."""


def row_entries(row_length: int) -> dict[str, DiskEntry]:
    """The entries that every dataset has."""
    shapes = {key: (1 if key in (TERMINATED, TRUNCATED) else row_length,) for key in DISK_DTYPES}
    return {key: DiskEntry(dtype, shapes[key]) for key, dtype in DISK_DTYPES.items()}


def further_entry(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> DiskEntry:
    """An entry beside those that every dataset has.

    Raises:
        ValueError: its name cannot be that of a file, or its dtype is not one of bool, int64 and float32.
    """
    if not (key.isidentifier() and key.isascii()) or keyword.iskeyword(key):
        raise ValueError(f"{key!r} cannot be the name of a dataset's entry: use ASCII letters, digits and underscores.")
    if dtype not in FURTHER_DTYPES.values():
        raise ValueError(f"'{key}' is {dtype}: further entries of a dataset are bool, int64 or float32.")
    return DiskEntry(dtype, shape)


def described_entry(manifest: Fields, key: str, dtype: str, shape: Sequence[int]) -> DiskEntry:
    """A further entry, as a manifest describes it.

    Raises:
        FileError: its name or its dtype is none of a further entry.
    """
    try:
        return further_entry(key, FURTHER_DTYPES.get(dtype, torch.float64), tuple(shape))
    except ValueError as error:
        raise manifest.error(f"has a bad entry: {shorten(str(error), 160)}") from error


def entries_of(manifest: Fields) -> dict[str, DiskEntry]:
    """All entries of a dataset, from its checked manifest."""
    found = manifest.object("entries")
    every = row_entries(manifest.take("row_length", int))
    for key in found.content:
        if key not in every:
            entry = found.object(key)
            dtype = FURTHER_DTYPES[entry.take("dtype", str)]
            every[key] = DiskEntry(dtype, tuple(entry.list_of("shape", int)[1:]))
    return every


def entry_file(key: str) -> str:
    """The file of an entry, relative to the dataset's folder."""
    return f"{ROWS}/{key}.memmap"


def map_rows(files: Mapping[str, Path], episodes: int, entries: Mapping[str, DiskEntry]) -> TensorDict:
    """Map the entries' files, by :func:`entry_file`, to tensors; ``meta.json`` is not read."""
    mapped = {
        key: MemoryMappedTensor.from_filename(files[entry_file(key)], dtype, torch.Size([episodes, *shape]))
        for key, (dtype, shape) in entries.items()
    }
    return TensorDict(mapped, batch_size=[episodes])


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in the manifest."""
    return str(dtype).removeprefix("torch.")


def read_dataset_manifest(folder: Path) -> Fields:
    """Read a dataset's manifest and check all fields that loading uses.

    Raises:
        FileNotFoundError: there is no dataset.
        FileError: the manifest is damaged or describes something other than a dataset.
    """
    path = folder / MANIFEST
    if not path.is_file():
        reason = "that folder does not exist" if not folder.exists() else f"{MANIFEST} is missing"
        if is_unfinished(folder):
            reason += ", but unfinished files beside it exist: writing was interrupted or is still in progress"
        raise FileNotFoundError(f"There is no dataset in {folder}: {reason}. Generate it again.")
    manifest = read_manifest(path, remedy=REMEDY, version=VERSION, kind=FORMAT)
    for name in ("tokens", "decisions", "terminated", "truncated"):
        manifest.at_least(name, 0)
    manifest.take("mean_return", float)
    manifest.take("source", str)
    manifest.take("notes", dict)
    tokenizer = manifest.object("tokenizer")
    tokenizer.take("fingerprint", str)
    tokenizer.at_least("vocab_size", 1)
    _check_entries(manifest)
    return manifest


def _check_entries(manifest: Fields) -> None:
    """Check the dtypes, shapes and checksums of the entries, and the checksums of the other files."""
    entries = manifest.object("entries")
    if not set(entries.content) >= set(DISK_DTYPES):
        found = f'has {shorten(sorted(entries.content))} as "entries", expected at least {sorted(DISK_DTYPES)}'
        raise manifest.error(found)
    episodes, known = manifest.at_least("episodes", 1), row_entries(manifest.at_least("row_length", 1))
    for key in entries.content:
        entry = entries.object(key)
        found_dtype, found_shape = entry.take("dtype", str), entry.list_of("shape", int)
        entry.take("sha256", str)
        if key not in known:
            _check_further(manifest, key, found_dtype, found_shape, episodes)
            continue
        dtype, shape = dtype_name(known[key].dtype), [episodes, *known[key].shape]
        if (found_dtype, found_shape) != (dtype, shape):
            raise manifest.error(f"does not describe '{key}' as {dtype} of shape {shape}")
    if manifest.at_least("version", 1) >= 2:
        files = manifest.object("files")
        for name in (TOKENIZER, META):
            files.take(name, str)


def _check_further(manifest: Fields, key: str, dtype: str, shape: list[int], episodes: int) -> None:
    """Check the description of an entry beside those that every dataset has."""
    if shape[:1] != [episodes] or min(shape) < 1:
        raise manifest.error(f"does not describe {shorten(key)} as an entry of {episodes} rows")
    described_entry(manifest, key, dtype, shape[1:])
