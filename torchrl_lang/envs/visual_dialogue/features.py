"""Image features on disk, read when they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_lang._files import FileError, one_line, regular_file

__all__ = ["ImageFeatures", "open_hdf5", "write_hdf5"]


def open_hdf5(path: str | Path, name: str, *, remedy: str) -> Any:
    """A dataset of an HDF5 file, which is open as long as the dataset is referenced.

    Raises:
        FileError: the file is missing, is not HDF5, or has no such dataset.
        ImportError: h5py is not installed.
    """
    h5py, path = _h5py(), regular_file(path, remedy)
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise FileError(path, f"is not an HDF5 file ({one_line(error)})", remedy) from error
    try:
        found = file.get(name)
    except (OSError, KeyError, RuntimeError) as error:
        raise FileError(path, f'has a damaged dataset "{name}" ({one_line(error)})', remedy) from error
    if not isinstance(found, h5py.Dataset):
        names = sorted(file.keys())
        file.close()
        raise FileError(path, f'has no dataset "{name}", it has {names}', remedy)
    return found


def write_hdf5(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as datasets of a new HDF5 file; the same arrays give the same bytes.

    Raises:
        ImportError: h5py is not installed.
    """
    with _h5py().File(path, "w", track_order=False) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, track_times=False)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            "HDF5 files of image features need h5py: pip install 'torchrl-lang[visdial]', or use .npy files."
        ) from error
    return h5py


_REMEDY = "give an HDF5 file with a dataset images_<split>, or a .npy file, of shape [images, features]"


class ImageFeatures:
    """The features ``[N, F]`` of the images of a split, in a file: HDF5 dataset ``images_<split>``, or ``.npy``.

    Only the requested rows are read. A pickled copy in another process opens the file again.

    Args:
        path: the file.
        split: "train", "val" or "test"; a ``.npy`` file holds one split.
        normalize: divide each row by its L2 norm, as the ILQL paper's code does. The models expect such features.

    Raises:
        FileError: the file is missing or damaged, has no such dataset, or its shape or dtype is wrong. Reading raises
            it for a row that is not finite or cannot be normalised because all of it is 0.
    """

    def __init__(self, path: str | Path, split: str, *, normalize: bool = True) -> None:
        self.path, self.split, self.normalize = Path(path), split, normalize
        self._opened: tuple[int, Any] | None = None
        shape, dtype = self._array.shape, self._array.dtype
        if len(shape) != 2 or not all(shape) or not np.issubdtype(dtype, np.floating):
            found = f"holds {self._name} of shape {list(shape)} and dtype {dtype}"
            raise FileError(self.path, f"{found}, expected floating-point numbers [images, features]", _REMEDY)
        self.feature_size: int = int(shape[1])
        self._images = int(shape[0])

    def __len__(self) -> int:
        """Number of images."""
        return self._images

    def rows(self, rows: Sequence[int] | Tensor) -> Tensor:
        """The features of some images, in any order, float32 ``[n, F]``."""
        wanted = np.asarray(rows, dtype=np.int64).reshape(-1)
        if len(wanted) == 0:
            return torch.empty(0, self.feature_size)
        if wanted.min() < 0 or wanted.max() >= len(self):
            raise IndexError(f"{self.path} has images 0 to {len(self) - 1}, got {wanted.min()} to {wanted.max()}.")
        unique, inverse = np.unique(wanted, return_inverse=True)  # HDF5 reads increasing rows only
        return self._checked(unique)[torch.from_numpy(inverse)]

    def blocks(self, size: int = 4096) -> Iterator[Tensor]:
        """All features in order, in blocks of ``size`` rows."""
        for start in range(0, len(self), size):
            yield self._checked(np.arange(start, min(start + size, len(self))))

    def all(self) -> Tensor:
        """All features, float32 ``[N, F]``."""
        return torch.cat(list(self.blocks()))

    def _checked(self, rows: np.ndarray) -> Tensor:
        """Increasing rows, normalised."""
        consecutive = rows[-1] - rows[0] == len(rows) - 1  # a slice is far faster than a list of rows
        try:
            read = self._array[int(rows[0]) : int(rows[-1]) + 1] if consecutive else self._array[rows]
        except (OSError, RuntimeError) as error:
            raise FileError(self.path, f"has damaged {self._name} ({one_line(error)})", _REMEDY) from error
        found = torch.from_numpy(np.array(read, dtype=np.float32))
        norm = found.norm(dim=-1, keepdim=True)
        bad = ~norm.isfinite() | (norm == 0 if self.normalize else False)
        if bad.any():
            place = int(bad.flatten().nonzero()[0])
            found_there = f"has a row {int(rows[place])} of {self._name} with the norm {float(norm[place])}"
            raise FileError(self.path, found_there, "compute the features of this image again")
        return found / norm if self.normalize else found

    @property
    def _name(self) -> str:
        return "its array" if self.path.suffix == ".npy" else f'"images_{self.split}"'

    @property
    def _array(self) -> Any:
        """The array of the file, opened once in each process: HDF5 handles do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), self._open()
        return self._opened[1]

    def _open(self) -> Any:
        if self.path.suffix != ".npy":
            return open_hdf5(self.path, f"images_{self.split}", remedy=_REMEDY)
        path = regular_file(self.path, _REMEDY)
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise FileError(self.path, f"is not a .npy file of numbers ({one_line(error)})", _REMEDY) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}
