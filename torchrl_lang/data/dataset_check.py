"""Check the sizes, checksums, values and sums of a dataset."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tensordict import TensorDictBase

from torchrl_lang._files import Fields, FileError, file_digest, file_in
from torchrl_lang.data.dataset_format import REMEDY, ROWS, entries_of, entry_file
from torchrl_lang.functional import decision_mask
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED, check_row

__all__ = ["RowSums", "check_block", "check_digests", "check_values", "dataset_files"]

_BLOCK_TOKENS = 1 << 22
"""Rows are checked in blocks of about this many tokens, because a dataset may be larger than memory."""


class RowSums:
    """The sums over rows that a manifest records."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("episodes", "tokens", "decisions", "terminated", "truncated"), 0)
        self._reward = self._magnitude = 0.0

    def add(self, rows: TensorDictBase) -> None:
        """Add rows ``[M]``."""
        masks = {
            "tokens": rows.get(ATTENTION_MASK),
            "decisions": decision_mask(rows.get(AGENT_MASK)),
            "terminated": rows.get(TERMINATED),
            "truncated": rows.get(TRUNCATED),
        }
        self.counts["episodes"] += rows.shape[0]
        for name, mask in masks.items():
            self.counts[name] += int(mask.sum())
        reward = rows.get(TOKEN_REWARD)
        self._reward += float(reward.sum(dtype=torch.float64))
        self._magnitude += float(reward.abs().sum(dtype=torch.float64))

    @property
    def mean_return(self) -> float:
        """Mean undiscounted return per episode."""
        return self._reward / self.counts["episodes"]

    def fits(self, mean_return: float) -> bool:
        """Whether a mean return equals this one up to rounding."""
        scale = self._magnitude / self.counts["episodes"]
        return math.isclose(self.mean_return, mean_return, rel_tol=1e-9, abs_tol=1e-9 * scale)


def check_block(rows: TensorDictBase, vocab_size: int, first: int) -> None:
    """Check the values of rows ``[M]``, the first of which is row ``first`` of a dataset.

    Raises:
        TypeError, ValueError: see :func:`~torchrl_lang.schema.check_row`; padding must hold valid token ids, too.
    """
    try:
        check_row(rows, vocab_size=vocab_size)
        least, most = (int(token) for token in rows.get(TOKENS).aminmax())
        if least < 0 or most >= vocab_size:
            raise ValueError(
                f"Padding holds the id {least if least < 0 else most}: models embed padding like any token, so its "
                f"ids must lie in [0, {vocab_size})."
            )
    except ValueError as error:
        raise ValueError(f"Rows from number {first}: {error}" if first else str(error)) from error


def dataset_files(folder: Path, manifest: Fields) -> dict[str, Path]:
    """The paths of all files with a checksum in the manifest, by name; checks the sizes of the entries' files.

    Raises:
        FileError: a file is missing, has the wrong size, or lies outside ``folder``.
    """
    entries = entries_of(manifest)
    names = [*map(entry_file, entries), *manifest.take("files", dict, {})]
    paths = {name: file_in(folder, name, remedy=REMEDY) for name in names}
    for path in paths.values():
        if not path.is_file():
            raise FileError(path, "is missing", REMEDY)
    for key, (dtype, shape) in entries.items():
        path = paths[entry_file(key)]
        size = dtype.itemsize * math.prod(shape) * manifest.take("episodes", int)
        if path.stat().st_size != size:
            raise FileError(path, f"has {path.stat().st_size} bytes, expected {size}", REMEDY)
    return paths


def check_digests(files: dict[str, Path], manifest: Fields) -> None:
    """Raise FileError unless all files have the checksums of the manifest."""
    digests = dict(manifest.take("files", dict, {}))
    for key in entries_of(manifest):
        digests[entry_file(key)] = manifest.object("entries").object(key).take("sha256", str)
    for name, path in files.items():
        if file_digest(path) != digests[name]:
            raise FileError(path, "was changed after it was written: its checksum differs from the manifest's", REMEDY)


def check_values(folder: Path, rows: TensorDictBase, manifest: Fields, vocab_size: int) -> None:
    """Check every row of a dataset and the sums in its manifest.

    Raises:
        FileError: a mask holds a byte other than 0 and 1, a row is malformed, or a sum is wrong.
    """
    sums, entries = RowSums(), entries_of(manifest)
    for block in rows.split(max(1, _BLOCK_TOKENS // manifest.at_least("row_length", 1))):
        for key, (dtype, _) in entries.items():
            if dtype == torch.bool and int(block.get(key).view(torch.uint8).amax()) > 1:
                raise FileError(folder / entry_file(key), "holds bytes other than 0 and 1", REMEDY)
        try:
            check_block(block, vocab_size, sums.counts["episodes"])
        except ValueError as error:
            raise FileError(folder / ROWS, f"holds a bad row: {error}", REMEDY) from error
        sums.add(block)
    for name, count in sums.counts.items():
        if manifest.take(name, int) != count:
            raise manifest.error(f'has {manifest.take(name, int)} as "{name}", the rows have {count}')
    if not sums.fits(found := manifest.take("mean_return", float)):
        raise manifest.error(f'has {found} as "mean_return", the rows have {sums.mean_return}')
