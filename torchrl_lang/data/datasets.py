"""Datasets on disk: rows as a memory-mapped TensorDict with a JSON manifest."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_lang._files import Fields, FileError, json_digest, read_json, shorten, write_file
from torchrl_lang.data.dataset_check import check_digests, check_values, dataset_files
from torchrl_lang.data.dataset_format import REMEDY, STAMP, TOKENIZER, entries_of, map_rows, read_dataset_manifest
from torchrl_lang.schema import TOKENS
from torchrl_lang.text.conversion import from_row
from torchrl_lang.text.episodes import Episode
from torchrl_lang.text.tokenizer_config import tokenizer_from_config
from torchrl_lang.text.tokenizers import Tokenizer, config_fingerprint, fingerprint

__all__ = ["RowDataset", "load_dataset"]

_SETTLED = 2_000_000_000
"""Nanoseconds after which a change certainly changes a file's time; some file systems have a resolution of 2 s."""


@dataclass(frozen=True)
class RowDataset:
    """A dataset opened by :func:`load_dataset`. Indexing reads rows into memory.

    ``rows`` is the memory-mapped TensorDict, int32 ``tokens``, batch size ``[N]``, with the entries of a row,
    ``terminated``, ``truncated`` and those that the writer kept beside them. Writing to its tensors would change the
    files.
    """

    folder: Path
    rows: TensorDictBase
    tokenizer: Tokenizer
    manifest: Mapping[str, Any]

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, index: Any) -> TensorDict:
        """Read rows into memory, with int64 ``tokens``."""
        picked = {key: value.clone() for key, value in self.rows[index].items()}
        picked[TOKENS] = picked[TOKENS].to(torch.int64)
        return TensorDict(picked, batch_size=picked[TOKENS].shape[:-1])

    def episode(self, index: int) -> Episode:
        """Decode one row."""
        return from_row(self[index], self.tokenizer)


def load_dataset(
    folder: str | os.PathLike[str], *, tokenizer: Tokenizer | None = None, verify: Literal["once"] | bool = "once"
) -> RowDataset:
    """Open a dataset; its rows stay on disk until they are indexed.

    Loading always checks sizes, dtypes and shapes, and compares the manifest and the tokenizer with their digests.
    Verification reads all rows in blocks and checks their checksums, that every row is well-formed (see
    :func:`~torchrl_lang.schema.check_row`), and the sums in the manifest.

    Args:
        folder: a folder that :class:`~torchrl_lang.data.DatasetWriter` or a function based on it wrote.
        tokenizer: if given, its fingerprint must match the dataset's tokenizer. Required for custom tokenizer classes.
        verify: ``"once"`` verifies the rows unless ``.verified.json`` records that they were verified and that no
            file's size, times or inode has changed since. True always verifies them, False never.

    Raises:
        FileNotFoundError: there is no dataset, or writing it was interrupted.
        FileError: the dataset is damaged, was changed, or has a later version.
        ValueError: the dataset has another tokenizer, or a custom one and ``tokenizer`` is missing.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import load_dataset, write_dataset
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("ab", 1.0), Turn("c")], terminated=True)], tokenizer, 12)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     _ = write_dataset(home + "/data", rows, tokenizer)
        ...     dataset = load_dataset(home + "/data")
        ...     dataset.episode(0).turns[1].text, dataset.manifest["mean_return"]
        ('c', 1.0)
    """
    if verify not in ("once", True, False):
        raise ValueError(f"verify must be 'once', True or False, got {verify!r}.")
    folder = Path(folder)
    manifest = read_dataset_manifest(folder)
    tokenizer = _tokenizer(folder, manifest, tokenizer)
    files = dataset_files(folder, manifest)
    shape = (manifest.take("episodes", int), entries_of(manifest))
    if verify:
        stamp = _Stamp(folder, json_digest(manifest.content), files)
        if verify != "once" or not stamp.is_there():
            check_digests(files, manifest)
            # Check a separate mapping, so that the pages read are released from memory afterwards.
            check_values(folder, map_rows(files, *shape), manifest, tokenizer.vocab_size)
            stamp.write()
    return RowDataset(folder, map_rows(files, *shape).lock_(), tokenizer, manifest.content)


def _tokenizer(folder: Path, manifest: Fields, given: Tokenizer | None) -> Tokenizer:
    """The tokenizer of the dataset."""
    config = read_json(folder / TOKENIZER, remedy=REMEDY)
    written_with = manifest.object("tokenizer")
    found = written_with.take("fingerprint", str)
    if config_fingerprint(config) != found:
        found = f"was changed: its fingerprint is not {shorten(found)}, which the manifest records"
        raise FileError(folder / TOKENIZER, found, REMEDY)
    if given is not None and fingerprint(given) != found:
        raise ValueError(
            f"The dataset in {folder} was written with a tokenizer of fingerprint {found}, but the given tokenizer has "
            f"{fingerprint(given)}, so its ids mean other text. Use the dataset's own tokenizer."
        )
    try:
        tokenizer = tokenizer_from_config(config) if given is None else given
    except ValueError as error:
        raise FileError(folder / TOKENIZER, f"is not a valid tokenizer ({error})", REMEDY) from error
    if tokenizer.vocab_size != written_with.take("vocab_size", int):
        raise manifest.error(f"has another vocab_size than {TOKENIZER}, which has {tokenizer.vocab_size}")
    return tokenizer


class _Stamp:
    """The size, times and inode of each file of a dataset at the time of construction.

    Create the stamp before the files are verified and write it afterwards. Writing, replacing or copying a file changes
    one of these numbers (programs cannot set the time of change), so the stamp no longer matches and the files are
    verified again. The stamp saves reading unchanged files; it does not protect against malicious changes.
    """

    def __init__(self, folder: Path, digest: str, files: Mapping[str, Path]) -> None:
        states = {name: path.stat() for name, path in files.items()}
        self._path = folder / STAMP
        self._settled = all(time.time_ns() - state.st_ctime_ns > _SETTLED for state in states.values())
        self._content = {
            "manifest": digest,
            "files": {
                name: [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
                for name, state in states.items()
            },
        }

    def is_there(self) -> bool:
        """Whether the current files were verified."""
        try:
            return read_json(self._path, remedy="delete it") == self._content
        except FileError:  # missing or damaged: verify
            return False

    def write(self) -> None:
        """Record that the files were verified, if the folder is writable."""
        if self._settled:
            with contextlib.suppress(OSError):  # in a read-only folder the files are verified each time
                write_file(self._path, json.dumps(self._content))
