"""The files of one checkpoint: a folder of safetensors and JSON, written atomically and verified when read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensordict
import torch
import torchrl
from safetensors.torch import save_file

from torchrl_lang import __version__
from torchrl_lang._files import (
    FileError,
    file_digest,
    read_json,
    read_manifest,
    read_tensors,
    write_folder,
    write_json,
    write_manifest,
)
from torchrl_lang.training.state import CheckpointError, join_state, split_state

__all__ = ["CheckpointError", "CheckpointInfo", "read_checkpoint", "read_info", "write_checkpoint"]

# torchrl.checkpoint also writes atomically, but reads a pickled payload if there is one, saves replay buffers with
# torch.save, does not flush to disk before it renames, has no checksums, and needs the metric at every save, although
# ours is known only after an evaluation.

_MANIFEST, _TENSORS, _STATE = "manifest.json", "tensors.safetensors", "state.json"
_FORMAT = 2
"""Format 2 added ``digest``, over the manifest."""


@dataclass(frozen=True)
class CheckpointInfo:
    """The content of a checkpoint's manifest."""

    step: int
    metrics: dict[str, float]
    objects: list[str]
    sha256: dict[str, str]


def write_checkpoint(path: Path, state: Mapping[str, Any], step: int, metrics: Mapping[str, float]) -> None:
    """Write the state dict of each object under a temporary name beside ``path``, flush it to disk, then rename it."""
    tree, tensors = split_state(state)
    with write_folder(path) as folder:
        save_file(tensors, folder / _TENSORS)
        write_json(folder / _STATE, tree)
        manifest = {
            "format": _FORMAT,
            "step": step,
            # Non-finite values are not JSON: they are written as text.
            "metrics": {k: float(v) if math.isfinite(v) else str(float(v)) for k, v in metrics.items()},
            "objects": list(state),
            "sha256": {name: file_digest(folder / name) for name in (_TENSORS, _STATE)},
            "versions": {
                "torchrl_lang": __version__,
                "torch": str(torch.__version__),
                "torchrl": torchrl.__version__,
                "tensordict": tensordict.__version__,
            },
        }
        write_manifest(folder / _MANIFEST, manifest)


def read_info(path: Path) -> CheckpointInfo:
    """Step, metrics, names of objects and checksums of a checkpoint.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    with _as_checkpoint_error():
        fields = read_manifest(path / _MANIFEST, remedy=_remedy(path), version=_FORMAT, field="format")
        metrics = fields.object("metrics")
        return CheckpointInfo(
            step=fields.at_least("step", 0),
            metrics={
                name: float(value) if value in ("nan", "inf", "-inf") else metrics.take(name, float)
                for name, value in metrics.content.items()
            },
            objects=fields.list_of("objects", str),
            sha256={name: fields.object("sha256").take(name, str) for name in (_TENSORS, _STATE)},
        )


def read_checkpoint(path: Path) -> tuple[CheckpointInfo, dict[str, Any]]:
    """The manifest, and the state dict of each object, by name; tensors are on the CPU.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    info, remedy = read_info(path), _remedy(path)
    with _as_checkpoint_error():
        for name, digest in info.sha256.items():
            if not (path / name).is_file():
                raise FileError(path / name, "is missing", remedy)
            if file_digest(path / name) != digest:
                raise FileError(path / name, "is damaged: its checksum differs from the manifest's", remedy)
        state = join_state(read_json(path / _STATE, remedy=remedy), read_tensors(path / _TENSORS, remedy=remedy))
    if not isinstance(state, dict) or list(state) != info.objects:
        raise CheckpointError(f"{path / _STATE} does not hold the objects {info.objects}: {remedy}.")
    return info, state


def _remedy(path: Path) -> str:
    return f"delete {path} to continue without it"


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except FileError as error:
        raise CheckpointError(str(error)) from error
