"""Write data sets: block by block, and in one piece or not at all."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import tensordict
import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase

import torchrl_lang
from torchrl_lang.data.claim import claimed
from torchrl_lang.data.dataset_format import (
    DISK_DTYPES,
    FORMAT,
    MANIFEST,
    ROWS,
    TOKENIZER,
    VERSION,
    partial_folder,
    replace_folder,
    write_json,
)
from torchrl_lang.data.datasets import RowDataset, load_dataset
from torchrl_lang.data.tokenizers import Tokenizer, fingerprint
from torchrl_lang.functional import decision_mask
from torchrl_lang.schema import (
    ACTION_MASK,
    ATTENTION_MASK,
    TERMINATED,
    TOKEN_REWARD,
    TOKENS,
    TRUNCATED,
    check_row,
    entry,
)

__all__ = ["DatasetWriter", "write_dataset"]


class DatasetWriter:
    """Context manager that writes a data set, of any size, in blocks.

    The files grow in ``<folder>.partial``, which becomes ``folder`` when the block of code ends well and is deleted
    when it fails. A ``.partial`` folder that a killed process left behind is deleted by the next writer.

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
        self._partial = partial_folder(self.folder)
        self._sums = dict.fromkeys(("episodes", "tokens", "decisions", "terminated", "truncated"), 0)
        self._return = 0.0

    def __enter__(self) -> DatasetWriter:
        with ExitStack() as claim:
            claim.enter_context(claimed(self._partial))
            self._check_target()  # under the claim: nobody finishes this data set in between
            (self._partial / ROWS).mkdir()
            self._files: dict[str, BinaryIO] = {key: self._path(key).open("wb") for key in DISK_DTYPES}
            self._claim = claim.pop_all()
        self._hashes = {key: hashlib.sha256() for key in DISK_DTYPES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._claim:
            for file in self._files.values():
                file.close()
            if kind is None:
                self._finish()

    def extend(self, rows: TensorDictBase) -> None:
        """Append rows ``[M]``: the entries of a row, ``terminated`` and ``truncated``; anything else stays out."""
        missing = [key for key in (TERMINATED, TRUNCATED) if rows.get(key, None) is None]
        if missing:
            raise ValueError(f"Rows of a data set need {missing}, bool [M, 1]: add how each episode ended.")
        tokens = entry(rows, TOKENS)
        if rows.ndim != 1 or tokens.shape[1:] != (self.row_length,):
            raise ValueError(
                f"Rows of shape {tuple(tokens.shape)} came, this data set takes [M, {self.row_length}]: "
                f"flatten them and give all rows the same width."
            )
        if rows.shape[0] == 0:
            return
        check_row(rows, vocab_size=self.tokenizer.vocab_size)
        for key, dtype in DISK_DTYPES.items():
            block = rows.get(key).detach().to("cpu", dtype).contiguous().numpy()
            data = memoryview(block).cast("B")
            self._files[key].write(data)
            self._hashes[key].update(data)
        self._count(rows)

    def _count(self, rows: TensorDictBase) -> None:
        counts = {
            "tokens": rows.get(ATTENTION_MASK),
            "decisions": decision_mask(rows.get(ACTION_MASK)),
            "terminated": rows.get(TERMINATED),
            "truncated": rows.get(TRUNCATED),
        }
        self._sums["episodes"] += rows.shape[0]
        for name, mask in counts.items():
            self._sums[name] += int(mask.sum())
        self._return += float(rows.get(TOKEN_REWARD).sum(dtype=torch.float64))

    def _check_target(self) -> None:
        if not self.folder.exists():
            return
        if not self.overwrite:
            raise FileExistsError(
                f"{self.folder} exists: give another folder, or overwrite=True to replace the data set."
            )
        if not (self.folder / MANIFEST).is_file() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise FileExistsError(f"{self.folder} holds something other than a data set, which is not overwritten.")

    def _path(self, key: str) -> Path:
        return self._partial / ROWS / f"{key}.memmap"

    def _finish(self) -> None:
        episodes = self._sums["episodes"]
        if episodes == 0:
            raise ValueError(f"No episode was written to {self.folder}: a data set holds at least one.")
        shapes = {key: [episodes, 1 if key in (TERMINATED, TRUNCATED) else self.row_length] for key in DISK_DTYPES}
        mapped = {
            key: MemoryMappedTensor.from_filename(self._path(key), dtype, shapes[key])
            for key, dtype in DISK_DTYPES.items()
        }
        # The data is in place already: this adds the meta.json by which tensordict finds it.
        TensorDict(mapped, batch_size=[episodes]).memmap_(self._partial / ROWS)
        entries = {
            key: {"dtype": str(dtype).removeprefix("torch."), "shape": shapes[key], "sha256": digest.hexdigest()}
            for (key, dtype), digest in zip(DISK_DTYPES.items(), self._hashes.values(), strict=True)
        }
        config = self.tokenizer.config()
        about = {"kind": config.get("kind"), "vocab_size": self.tokenizer.vocab_size}
        versions = {"torchrl_lang": torchrl_lang.__version__, "tensordict": tensordict.__version__}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            **self._sums,
            "mean_return": self._return / episodes,
            "row_length": self.row_length,
            "seed": self.seed,
            "source": self.source,
            "notes": self.notes,
            "tokenizer": {**about, "fingerprint": fingerprint(self.tokenizer)},
            "entries": entries,
            "created_by": {**versions, "torch": str(torch.__version__)},
        }
        write_json(self._partial / TOKENIZER, config)
        write_json(self._partial / MANIFEST, manifest)
        replace_folder(self._partial, self.folder)


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
    return load_dataset(folder, tokenizer=tokenizer)
