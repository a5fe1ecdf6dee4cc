"""One checkpoint on disk: a folder of safetensors and JSON, written atomically and verified when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensordict
import torch
import torchrl
from safetensors.torch import load_file, save_file

from torchrl_lang import __version__
from torchrl_lang.training.state import join_state, split_state

__all__ = [
    "CheckpointError",
    "is_checkpoint",
    "read_checkpoint",
    "read_manifest",
    "remove_checkpoint",
    "write_checkpoint",
]

# torchrl.checkpoint writes atomically, too, but reads a pickled payload where it finds one in the folder, saves replay
# buffers with torch.save, does not flush to disk before it renames, has no checksums, and its rotation wants the metric
# at every save, where ours is known only when games have been played. Hence this small writer.

_MANIFEST, _TENSORS, _STATE = "manifest.json", "tensors.safetensors", "state.json"
_FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint is damaged, or does not fit what is to be restored."""


def write_checkpoint(path: Path, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
    """Write a checkpoint to a new folder: in full under a temporary name beside it, flushed to disk, then renamed.

    Args:
        path: the folder; must not exist, its parent must.
        state: state dict of each object, by name.
        step: number of training steps done.
        metrics: figures to keep with it.
    """
    for leftover in path.parent.glob(".writing-*"):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    tree, tensors = split_state(state)
    temporary = path.with_name(f".writing-{uuid.uuid4().hex}")
    temporary.mkdir()
    save_file(tensors, temporary / _TENSORS)
    _write_json(temporary / _STATE, tree)
    manifest = {
        "format": _FORMAT,
        "step": step,
        "metrics": {key: float(value) for key, value in metrics.items()},
        "objects": list(state),
        "sha256": {name: _digest(temporary / name) for name in (_TENSORS, _STATE)},
        "versions": {
            "torchrl_lang": __version__,
            "torch": str(torch.__version__),
            "torchrl": torchrl.__version__,
            "tensordict": tensordict.__version__,
        },
    }
    _write_json(temporary / _MANIFEST, manifest)
    for file in temporary.iterdir():
        _flush(file)
    _flush(temporary)
    os.replace(temporary, path)
    _flush(path.parent)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest, which is so of whole checkpoints only."""
    return (path / _MANIFEST).is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """Step, metrics, names of objects, checksums and versions of a checkpoint."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path / _MANIFEST} is damaged: delete {path} to do without it.") from error
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']}, this version reads format {_FORMAT}.")
    return manifest


def read_checkpoint(path: Path) -> dict[str, Any]:
    """State dict of each object, by name; tensors are on the CPU.

    Raises:
        CheckpointError: a file is missing or its checksum differs from the manifest's.
    """
    for name, digest in read_manifest(path)["sha256"].items():
        if not (path / name).is_file() or _digest(path / name) != digest:
            raise CheckpointError(
                f"{path / name} is damaged: its checksum differs from the manifest's. Delete {path} to go back to the "
                "checkpoint before it."
            )
    tree = json.loads((path / _STATE).read_text(encoding="utf-8"))
    return join_state(tree, load_file(path / _TENSORS))


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that one is either whole or not there."""
    doomed = path.with_name(f".writing-{uuid.uuid4().hex}")
    os.replace(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if os.name == "nt":  # flushes neither folders nor files that are open for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
