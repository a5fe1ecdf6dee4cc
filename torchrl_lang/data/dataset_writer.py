"""Write data sets: block by block, and in one piece or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import tensordict
import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase

import torchrl_lang
from torchrl_lang.data.dataset_check import RowSums, check_block
from torchrl_lang.data.dataset_format import (
    DISK_DTYPES,
    FORMAT,
    MANIFEST,
    META,
    ROWS,
    TOKENIZER,
    VERSION,
    dtype_name,
    entry_file,
    entry_shapes,
)
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.tokenizers import Tokenizer, fingerprint
from torchrl_lang.schema import TERMINATED, TOKENS, TRUNCATED, entry
from torchrl_lang.storage import file_digest, write_folder, write_json, write_manifest

__all__ = ["DatasetWriter", "write_dataset"]


class DatasetWriter:
    """Context manager that writes a data set, of any size, in blocks.

    The files grow in a temporary folder beside ``folder``, which becomes ``folder`` when the block of code ends well
    and is deleted when it fails. What a killed process left behind is deleted by the next writer of the same folder.

    Args:
        folder: where the data set shall stand.
        tokenizer: the tokenizer of the rows.
        row_length: ``T``.
        seed: the seed that made the data, for the record.
        source: who made the data, in words, for the record.
        overwrite: replace the data set that stands there.

    Attributes:
        notes: anything more to keep in the manifest, as JSON.

    Raises:
        FileExistsError: ``folder`` exists and is not to be overwritten, holds something other than a data set, or
            another writer is at work on it.
        KeyError: rows lack an entry.
        ValueError: nothing was written, or rows do not fit the schema or the width.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.data import CharTokenizer, DatasetWriter, Episode, Turn, load_dataset, to_rows
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
    ) -> None:
        self.folder, self.tokenizer, self.row_length = Path(folder), tokenizer, row_length
        self.seed, self.source, self.overwrite = seed, source, overwrite
        self.notes: dict[str, Any] = {}

    def __enter__(self) -> DatasetWriter:
        self._writing = self._written()
        self._writing.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.__exit__(kind, error, trace)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """The files are open; when the block ends well, the data set is finished."""
        with write_folder(self.folder) as partial:
            self._check_target()  # under the writer's lock: nobody finishes this data set in between
            (partial / ROWS).mkdir()
            self._sums = RowSums()
            self._hashes = {key: hashlib.sha256() for key in DISK_DTYPES}
            with ExitStack() as files:
                self._files: dict[str, BinaryIO] = {
                    key: files.enter_context((partial / entry_file(key)).open("wb")) for key in DISK_DTYPES
                }
                yield
            self._finish(partial)

    def extend(self, rows: TensorDictBase) -> None:
        """Append rows ``[M]``: the entries of a row, ``terminated`` and ``truncated``; anything else stays out.

        Raises:
            KeyError, TypeError, ValueError: the rows lack an entry, or their types, shapes or values do not fit the
                schema, the tokenizer or the width. Then none of them was written.
        """
        tokens = entry(rows, TOKENS)
        for key in (TERMINATED, TRUNCATED):
            value = rows.get(key, None)
            if value is None or value.dtype != torch.bool or value.shape != (*rows.shape, 1):
                came = "nothing" if value is None else f"{value.dtype} of shape {list(value.shape)}"
                raise ValueError(f"Rows of a data set need '{key}', bool [M, 1], got {came}: add how each one ended.")
        if rows.ndim != 1 or tokens.shape[1:] != (self.row_length,):
            raise ValueError(
                f"Rows of shape {tuple(tokens.shape)} came, this data set takes [M, {self.row_length}]: "
                f"flatten them and give all rows the same width."
            )
        if rows.shape[0] == 0:
            return
        check_block(rows, self.tokenizer.vocab_size, first=self.rows)
        for key, dtype in DISK_DTYPES.items():
            block = rows.get(key).detach().to("cpu", dtype).contiguous().numpy()
            data = memoryview(block).cast("B")
            self._files[key].write(data)
            self._hashes[key].update(data)
        self._sums.add(rows)

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return self._sums.counts["episodes"]

    def _check_target(self) -> None:
        if not self.folder.exists():
            return
        if not self.overwrite:
            raise FileExistsError(
                f"{self.folder} exists: give another folder, or overwrite=True to replace the data set."
            )
        if not (self.folder / MANIFEST).is_file() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise FileExistsError(f"{self.folder} holds something other than a data set, which is not overwritten.")

    def _finish(self, partial: Path) -> None:
        episodes = self.rows
        if episodes == 0:
            raise ValueError(f"No episode was written to {self.folder}: a data set holds at least one.")
        shapes = entry_shapes(episodes, self.row_length)
        mapped = {
            key: MemoryMappedTensor.from_filename(partial / entry_file(key), dtype, torch.Size(shapes[key]))
            for key, dtype in DISK_DTYPES.items()
        }
        # The data is in place already: this adds the meta.json by which tensordict finds it.
        TensorDict(mapped, batch_size=[episodes]).memmap_(partial / ROWS)
        entries = {
            key: {"dtype": dtype_name(key), "shape": shapes[key], "sha256": digest.hexdigest()}
            for key, digest in self._hashes.items()
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
) -> RowDataset:
    """Write rows ``[N, T]`` as a data set and open it; see :class:`DatasetWriter` for the arguments."""
    width = entry(rows, TOKENS).shape[-1]
    with DatasetWriter(folder, tokenizer, width, seed=seed, source=source, overwrite=overwrite) as writer:
        writer.extend(rows)
    return load_dataset(folder, tokenizer=tokenizer, verify=False)  # each block was checked when it was written
