"""HDF5 files of image features; the only module that imports h5py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_lang._files import FileError, one_line, regular_file

__all__ = ["open_hdf5", "write_hdf5"]


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
