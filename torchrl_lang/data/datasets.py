"""Data sets on disk: rows as a memory-mapped TensorDict beside a JSON manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_lang.data.conversion import from_row
from torchrl_lang.data.dataset_format import (
    DISK_DTYPES,
    FORMAT,
    MANIFEST,
    ROWS,
    TOKENIZER,
    VERSION,
    partial_folder,
    read_json,
)
from torchrl_lang.data.episodes import Episode
from torchrl_lang.data.tokenizer_config import tokenizer_from_config
from torchrl_lang.data.tokenizers import Tokenizer, fingerprint
from torchrl_lang.schema import TOKENS

__all__ = ["RowDataset", "load_dataset"]


@dataclass(frozen=True)
class RowDataset:
    """A data set that :func:`load_dataset` opened. Indexing it reads rows into memory.

    ``rows`` is the memory-mapped TensorDict itself, int32 ``tokens``, batch size ``[N]``: writing into its tensors
    would write to the disk.
    """

    folder: Path
    rows: TensorDictBase
    tokenizer: Tokenizer
    manifest: Mapping[str, Any]

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, index: Any) -> TensorDict:
        """Rows in memory, int64 ``tokens``."""
        picked = {key: value.clone() for key, value in self.rows[index].items()}
        picked[TOKENS] = picked[TOKENS].to(torch.int64)
        return TensorDict(picked, batch_size=picked[TOKENS].shape[:-1])

    def episode(self, index: int) -> Episode:
        """One row as text."""
        return from_row(self[index], self.tokenizer)


def load_dataset(
    folder: str | os.PathLike[str], *, tokenizer: Tokenizer | None = None, verify: bool = False
) -> RowDataset:
    """Open a data set without reading it into memory.

    Args:
        folder: what :class:`~torchrl_lang.data.DatasetWriter` or one of the functions around it wrote.
        tokenizer: where given, the data set must have been written with the very same one. Needed for a tokenizer of a
            kind that this library does not know.
        verify: read all data and compare its checksums.

    Raises:
        FileNotFoundError: there is no data set, or writing it was interrupted.
        ValueError: the data set is damaged, of another version, or of another tokenizer.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import CharTokenizer, Episode, Turn, load_dataset, to_rows, write_dataset
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("ab", 1.0), Turn("c")], terminated=True)], tokenizer, 12)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     _ = write_dataset(home + "/data", rows, tokenizer)
        ...     dataset = load_dataset(home + "/data", verify=True)
        ...     dataset.episode(0).turns[1].text, dataset.manifest["mean_return"]
        ('c', 1.0)
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    config = read_json(folder / TOKENIZER)
    found = manifest["tokenizer"]["fingerprint"]
    tokenizer = tokenizer_from_config(config) if tokenizer is None else tokenizer
    if fingerprint(tokenizer) != found:
        raise ValueError(
            f"The data set in {folder} was written with a tokenizer of fingerprint {found}, the tokenizer at hand has "
            f"{fingerprint(tokenizer)}: its ids mean other text. Use the tokenizer that the data set brings."
        )
    _check_files(folder, manifest, verify)
    rows = TensorDict.load_memmap(folder / ROWS, allow_pickle=False)
    expected = {key: (*entry["shape"],) for key, entry in manifest["entries"].items()}
    if {key: tuple(value.shape) for key, value in rows.items()} != expected:
        raise ValueError(
            f"{folder / ROWS / 'meta.json'} does not describe the entries of the manifest: it was changed."
        )
    return RowDataset(folder, rows, tokenizer, manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        reason = "that folder does not exist" if not folder.exists() else f"{MANIFEST} is missing"
        if partial_folder(folder).exists():
            reason += f", but {partial_folder(folder)} does: writing it was interrupted or still goes on. Make it again"
        raise FileNotFoundError(f"There is no data set in {folder}: {reason}.")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(
            f"{folder / MANIFEST} says format {manifest.get('format')!r} version {manifest.get('version')!r}, this "
            f"release reads {FORMAT!r} version {VERSION}: make the data set again."
        )
    return manifest


def _check_files(folder: Path, manifest: Mapping[str, Any], verify: bool) -> None:
    for key, entry in manifest["entries"].items():
        path = folder / ROWS / f"{key}.memmap"
        size = DISK_DTYPES[key].itemsize * torch.Size(entry["shape"]).numel()
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            came = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise ValueError(f"{path} {came}: the data set is damaged, make it again.")
        if verify:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry["sha256"]:
                raise ValueError(f"{path} was changed after it was written: its checksum differs from the manifest's.")
