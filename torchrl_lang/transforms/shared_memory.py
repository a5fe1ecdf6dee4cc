"""Modules whose small state lives on the host and, once asked, in memory that all processes of a machine see."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["HostModule", "SharedTensors"]

_MEMORY_FOLDER = "/dev/shm"


class SharedTensors:
    """CPU tensors in files that any process of this machine maps: what one writes, all read.

    Pickled, it is the name of its folder. TorchRL sends environment factories to its workers as bytes of cloudpickle,
    in which torch's own shared tensors are copies; a mapped file is the same memory wherever its name arrives. The
    folder is removed when this object, in the process that made it, is collected or the process exits. Processes that
    have mapped the files by then keep the memory. A process that is killed leaves its folder behind.

    Args:
        tensors: the tensors by name; their values are copied.

    Raises:
        FileNotFoundError: on unpickling, the folder is gone, or this is another machine.

    Examples:
        >>> import pickle
        >>> import torch
        >>> from torchrl_lang.transforms.shared_memory import SharedTensors
        >>> memory = SharedTensors({"coef": torch.tensor(0.5)})
        >>> elsewhere = pickle.loads(pickle.dumps(memory))
        >>> _ = elsewhere.tensors["coef"].fill_(0.25)
        >>> memory.tensors["coef"]
        tensor(0.2500)
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        parent = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK | os.X_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="torchrl_lang-", dir=parent))
        weakref.finalize(self, _remove, str(self.folder), os.getpid())
        self._layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            # Written, not only made long: where memory is short this raises, while touching a hole would kill.
            (self.folder / name).write_bytes(bytes(tensor.nbytes))
        self.tensors = self._map()
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    def _map(self) -> dict[str, Tensor]:
        return {name: self._map_one(self.folder / name, *layout) for name, layout in self._layout.items()}

    def _map_one(self, path: Path, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        if not path.is_file():
            raise FileNotFoundError(
                f"The shared memory {path} is gone: keep the module that shared it alive until every worker has "
                "received it, and send it only to processes of the same machine."
            )
        flat = torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype, device="cpu")
        return flat.view(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_layout": self._layout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tensors = self._map()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class HostModule(nn.Module):
    """A module of buffers that stay on the CPU, in their own dtype, and can be shared between processes.

    ``.to(...)``, ``.cuda()``, ``.half()`` and their like leave the buffers where and as they are: a scalar on the CPU
    multiplies tensors of any device without waiting for it, and processes share no memory of a GPU in this way.
    """

    memory: SharedTensors | None
    """Where the buffers live once shared; ``None`` before."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = None

    def share_memory(self) -> Self:
        """Move the buffers to memory that every process of this machine sees which receives this module.

        It may go there by pickle, cloudpickle, spawn or fork. Changes in place are then seen by all, and so is
        ``load_state_dict``. Nothing is locked: let one process write. Sharing again changes nothing, and so does
        sharing in a copy. ``share_memory()`` of a module around this one does the same.

        Copies of a shared module, shallow or deep, are shared too: TorchRL deep-copies what it hands to workers
        (``create_env_kwargs``, a ``postproc``), and there a copy of its own would silently no longer follow. For an
        independent one build another and load the ``state_dict``. Keep the module alive while others may still
        receive it.
        """
        if self.memory is None:
            self.memory = SharedTensors(dict(self.named_buffers(recurse=False)))
            self._buffers.update(self.memory.tensors)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A module around this one passes its own share_memory() down as a function of tensors like any other.
        probe = fn(torch.zeros((), device="cpu"))
        if probe.device.type == "cpu" and probe.is_shared():
            self.share_memory()
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # Always in place, assign=True or not: another tensor would have another dtype, device or memory.
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self.memory is not None:
            state["_buffers"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.memory is not None:
            self._buffers = dict(self.memory.tensors)


def _remove(folder: str, owner: int) -> None:
    # A forked child inherits this callback with everything else, but not the folder.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
