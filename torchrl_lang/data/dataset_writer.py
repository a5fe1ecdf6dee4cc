"""Write datasets in blocks and atomically."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import tensordict
import torch
from tensordict import TensorDictBase

import torchrl_lang
from torchrl_lang._files import file_digest, write_folder, write_json, write_manifest
from torchrl_lang.data.dataset_check import RowSums, check_block
from torchrl_lang.data.dataset_format import (
    DISK_DTYPES,
    FORMAT,
    MANIFEST,
    META,
    ROWS,
    TOKENIZER,
    VERSION,
    DiskEntry,
    dtype_name,
    entry_file,
    further_entry,
    map_rows,
    row_entries,
)
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.schema import FEATURES, FEATURES_MASK, TERMINATED, TOKENS, TRUNCATED, entry
from torchrl_lang.text.tokenizers import Tokenizer, fingerprint

__all__ = ["DatasetWriter", "write_dataset"]


class DatasetWriter:
    """Context manager that writes a dataset of any size in blocks.

    The files are written to a temporary folder beside ``folder``. It is renamed to ``folder`` when the ``with`` block
    succeeds and deleted when it fails. The next writer of the same folder deletes what a killed process left.

    Args:
        folder: the folder to create.
        tokenizer: the tokenizer of the rows.
        row_length: ``T``.
        seed: the seed of the data, recorded in the manifest.
        source: a description of the behaviour policy and environment, recorded in the manifest.
        overwrite: replace an existing dataset.
        keep: names of further entries to write, bool, int64 or float32 ``[N, ...]``, such as a number of each row's
            kind. Features, ``features`` and ``features_mask``, are always kept. Datasets with such entries cannot be
            read by releases before this option.

    Attributes:
        notes: further JSON content for the manifest.

    Raises:
        FileExistsError: ``folder`` exists and ``overwrite`` is False, ``folder`` holds something other than a dataset,
            or another process is writing it.
        KeyError: rows lack an entry.
        ValueError: no rows were written, or rows do not fit the schema or ``row_length``.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import DatasetWriter, load_dataset
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("ab", 1.0)], terminated=True)], tokenizer, 8)
        >>> with tempfile.TemporaryDirectory() as home:
        ...     with DatasetWriter(home + "/data", tokenizer, 8, source="an example") as writer:
        ...         for block in range(3):
        ...             writer.extend(rows)
        ...     len(load_dataset(home + "/data"))
        3
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        tokenizer: Tokenizer,
        row_length: int,
        *,
        seed: int | None = None,
        source: str = "",
        overwrite: bool = False,
        keep: Sequence[str] = (),
    ) -> None:
        self.folder, self.tokenizer, self.row_length = Path(folder), tokenizer, row_length
        self.seed, self.source, self.overwrite = seed, source, overwrite
        self.keep = tuple(key for key in dict.fromkeys(keep) if key not in DISK_DTYPES)
        self.notes: dict[str, Any] = {}

    def __enter__(self) -> DatasetWriter:
        self._writing = self._written()
        self._writing.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._writing.__exit__(*error)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Open the files; complete the dataset when the block succeeds."""
        with write_folder(self.folder) as partial:
            self._check_target()  # under the writer's lock, so that no other process completes this dataset meanwhile
            (partial / ROWS).mkdir()
            self._sums, self._entries = RowSums(), row_entries(self.row_length)
            for key in self.keep:
                further_entry(key, torch.int64, ())  # its name must be that of a file
            self._hashes: dict[str, Any] = {}
            self._files: dict[str, BinaryIO] = {}
            with ExitStack() as files:
                self._place, self._open_files = partial, files
                self._open(*self._entries, *self.keep)
                yield
            self._finish(partial)

    def _open(self, *keys: str) -> None:
        """Begin the files of entries."""
        for key in keys:
            self._hashes[key] = hashlib.sha256()
            self._files[key] = self._open_files.enter_context((self._place / entry_file(key)).open("wb"))

    def extend(self, rows: TensorDictBase) -> None:
        """Append rows ``[M]`` with the entries of a row, ``terminated``, ``truncated`` and those of ``keep``.

        Features are kept, too, if the first rows have some. Other entries are dropped.

        Raises:
            KeyError, TypeError, ValueError: the rows lack an entry, or do not fit the schema, the tokenizer or
                ``row_length``; or they have features, and rows before had none. No row of the call is written then.
        """
        tokens = entry(rows, TOKENS)
        for key in (TERMINATED, TRUNCATED):
            value = rows.get(key, None)
            if value is None or value.dtype != torch.bool or value.shape != (*rows.shape, 1):
                came = "nothing" if value is None else f"{value.dtype} of shape {list(value.shape)}"
                raise ValueError(f"Rows of a dataset need '{key}', bool [M, 1], got {came}: add how each one ended.")
        if rows.ndim != 1 or tokens.shape[1:] != (self.row_length,):
            raise ValueError(
                f"A dataset of row_length {self.row_length} takes rows [M, {self.row_length}], got "
                f"{tuple(tokens.shape)}: flatten them and give all rows the same width."
            )
        if rows.shape[0] == 0:
            return
        check_block(rows, self.tokenizer.vocab_size, first=self.rows)
        self._keep_features(rows)
        self._entries |= {key: self._kept(rows, key) for key in self.keep}
        for key, (dtype, _) in self._entries.items():
            block = rows.get(key).detach().to("cpu", dtype).contiguous().numpy()
            data = memoryview(block).cast("B")
            self._files[key].write(data)
            self._hashes[key].update(data)
        self._sums.add(rows)

    def _keep_features(self, rows: TensorDictBase) -> None:
        """Keep the features of the first rows; those of later rows alone are an error."""
        found = [key for key in (FEATURES, FEATURES_MASK) if rows.get(key, None) is not None and key not in self.keep]
        if found and self.rows:
            raise ValueError(f"These rows have {found}, but the rows before had none: give all rows the same entries.")
        for key in found:
            self._kept(rows, key)
        self._open(*found)
        self.keep += tuple(found)

    def _kept(self, rows: TensorDictBase, key: str) -> DiskEntry:
        """How a further entry of these rows is stored, which must be like that of the rows before."""
        value = entry(rows, key)
        found = further_entry(key, value.dtype, tuple(value.shape[1:]))
        if (known := self._entries.get(key, found)) != found:
            raise ValueError(
                f"'{key}' is {found.dtype} of shape {list(found.shape)} in these rows, but {known.dtype} of shape "
                f"{list(known.shape)} in the rows before: give all rows the same."
            )
        return found

    @property
    def rows(self) -> int:
        """Number of rows written."""
        return self._sums.counts["episodes"]

    def _check_target(self) -> None:
        if not self.folder.exists():
            return
        if not self.overwrite:
            raise FileExistsError(
                f"{self.folder} exists: give another folder, or overwrite=True to replace the dataset."
            )
        if not (self.folder / MANIFEST).is_file() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise FileExistsError(f"{self.folder} holds something other than a dataset, which is not overwritten.")

    def _finish(self, partial: Path) -> None:
        episodes = self.rows
        if episodes == 0:
            raise ValueError(f"No episode was written to {self.folder}: a dataset needs at least one.")
        files = {name: partial / name for name in map(entry_file, self._entries)}
        # The data is written already: this adds the meta.json that tensordict needs.
        map_rows(files, episodes, self._entries).memmap_(partial / ROWS)
        entries = {
            key: {"dtype": dtype_name(dtype), "shape": [episodes, *shape], "sha256": self._hashes[key].hexdigest()}
            for key, (dtype, shape) in self._entries.items()
        }
        config = self.tokenizer.config()
        write_json(partial / TOKENIZER, config)
        about = {"kind": config.get("kind"), "vocab_size": self.tokenizer.vocab_size}
        versions = {"torchrl_lang": torchrl_lang.__version__, "tensordict": tensordict.__version__}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            **self._sums.counts,
            "mean_return": self._sums.mean_return,
            "row_length": self.row_length,
            "seed": self.seed,
            "source": self.source,
            "notes": self.notes,
            "tokenizer": {**about, "fingerprint": fingerprint(self.tokenizer)},
            "entries": entries,
            "files": {name: file_digest(partial / name) for name in (TOKENIZER, META)},
            "created_by": {**versions, "torch": str(torch.__version__)},
        }
        write_manifest(partial / MANIFEST, manifest)


def write_dataset(
    folder: str | os.PathLike[str],
    rows: TensorDictBase,
    tokenizer: Tokenizer,
    *,
    seed: int | None = None,
    source: str = "",
    overwrite: bool = False,
    keep: Sequence[str] = (),
    notes: Mapping[str, Any] | None = None,
) -> RowDataset:
    """Write rows ``[N, T]`` as a dataset and open it; see :class:`DatasetWriter` for the arguments."""
    width = entry(rows, TOKENS).shape[-1]
    options: dict[str, Any] = {"seed": seed, "source": source, "overwrite": overwrite, "keep": keep}
    with DatasetWriter(folder, tokenizer, width, **options) as writer:
        writer.notes = dict(notes or {})
        writer.extend(rows)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)  # extend() checked each block
