"""The files of a dataset's folder: their names, dtypes and shapes, and the manifest that describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tensordict import MemoryMappedTensor, TensorDict

from torchrl_lang.schema import ACTION_MASK, ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED
from torchrl_lang.storage import Fields, FileError, is_unfinished, read_manifest, shorten

__all__ = [
    "DISK_DTYPES",
    "FORMAT",
    "MANIFEST",
    "META",
    "REMEDY",
    "ROWS",
    "STAMP",
    "TOKENIZER",
    "VERSION",
    "dtype_name",
    "entry_file",
    "entry_shapes",
    "map_rows",
    "read_dataset_manifest",
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
    ACTION_MASK: torch.bool,
    TOKEN_REWARD: torch.float32,
    TERMINATED: torch.bool,
    TRUNCATED: torch.bool,
}
"""The entries of a dataset and their dtypes on disk."""


def entry_shapes(episodes: int, row_length: int) -> dict[str, tuple[int, int]]:
    """Shape of each entry of a dataset."""
    return {key: (episodes, 1 if key in (TERMINATED, TRUNCATED) else row_length) for key in DISK_DTYPES}


def entry_file(key: str) -> str:
    """The file of an entry, relative to the dataset's folder."""
    return f"{ROWS}/{key}.memmap"


def map_rows(files: Mapping[str, Path], episodes: int, row_length: int) -> TensorDict:
    """Map the entries' files, by :func:`entry_file`, to tensors; ``meta.json`` is not read."""
    mapped = {
        key: MemoryMappedTensor.from_filename(files[entry_file(key)], DISK_DTYPES[key], torch.Size(shape))
        for key, shape in entry_shapes(episodes, row_length).items()
    }
    return TensorDict(mapped, batch_size=[episodes])


def dtype_name(key: str) -> str:
    """Name of an entry's dtype in the manifest."""
    return str(DISK_DTYPES[key]).removeprefix("torch.")


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
    manifest = read_manifest(path, remedy=REMEDY, version=VERSION)
    if manifest.take("format", str) != FORMAT:
        raise FileError(path, f'has {manifest.content["format"]!r} as "format", expected {FORMAT!r}', REMEDY)
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
    if set(entries.content) != set(DISK_DTYPES):
        raise manifest.error(f'has {shorten(sorted(entries.content))} as "entries", expected {sorted(DISK_DTYPES)}')
    shapes = entry_shapes(manifest.at_least("episodes", 1), manifest.at_least("row_length", 1))
    for key, shape in shapes.items():
        entry = entries.object(key)
        if (entry.take("dtype", str), entry.list_of("shape", int)) != (dtype_name(key), list(shape)):
            raise manifest.error(f"does not describe '{key}' as {dtype_name(key)} of shape {list(shape)}")
        entry.take("sha256", str)
    if manifest.at_least("version", 1) >= 2:
        files = manifest.object("files")
        for name in (TOKENIZER, META):
            files.take(name, str)
