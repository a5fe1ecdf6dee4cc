"""Modules with small buffers that stay on the CPU and can be in memory that several processes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

__all__ = ["HostModule"]

_Handle = tuple[bytes, bytes, int, torch.dtype, torch.Size]


class HostModule(nn.Module):
    """A module whose buffers stay on the CPU, keep their dtype, and can be shared between processes.

    ``.to(...)``, ``.cuda()``, ``.half()`` and similar methods do not change the buffers: a scalar on the CPU can be
    multiplied with tensors on any device without synchronization. The ``state_dict`` holds copies of the buffers.

    Examples:
        >>> import pickle
        >>> from torchrl_lang.transforms import ConstantKLController
        >>> controller = ConstantKLController(0.5).share_memory()
        >>> elsewhere = pickle.loads(pickle.dumps(controller))
        >>> _ = elsewhere.coef.fill_(0.25)
        >>> controller()
        tensor(0.2500)
    """

    def __init__(self) -> None:
        super().__init__()
        self._handles: dict[str, _Handle] | None = None

    @property
    def shared(self) -> bool:
        """Whether the buffers are in shared memory."""
        return self._handles is not None

    def share_memory(self) -> Self:
        """Move the buffers to memory that is shared with every process of this machine that receives this module.

        The module may be sent by pickle, cloudpickle, spawn or fork. All processes then see in-place changes, including
        those of ``load_state_dict``. There is no lock: only one process should write. Sharing twice changes nothing.
        ``share_memory()`` of a parent module does the same.

        Copies of a shared module, shallow or deep, are shared too, because TorchRL deep-copies what it sends to workers
        (``create_env_kwargs``, a ``postproc``). For an independent one build another and load the ``state_dict``. Keep
        the module alive until all workers have received it; torch frees the memory with its last user.
        """
        if self._handles is None:
            self._handles = {
                name: (*buffer.untyped_storage()._share_filename_cpu_(), buffer.dtype, buffer.shape)
                for name, buffer in self.named_buffers(recurse=False)
            }
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The share_memory() of a parent module arrives here as a function of tensors like any other.
        probe = fn(torch.zeros((), device="cpu"))
        if probe.device.type == "cpu" and probe.is_shared():
            self.share_memory()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Copies, because torch moves the memory of a tensor that it sends to another process.
        for name, buffer in self.named_buffers(recurse=False):
            destination[prefix + name] = buffer.clone()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # Always in place, even with assign=True: another tensor would have another dtype, device or memory.
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    # Send the name of the memory: torch's shared tensors are shared only with processes that inherit a file descriptor,
    # and the cloudpickle with which TorchRL sends environment factories to its workers copies them.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffers": {}} if self.shared else self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._handles is not None:
            self._buffers = {name: _opened(*handle) for name, handle in self._handles.items()}


def _opened(manager: bytes, name: bytes, size: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    try:
        storage = torch.UntypedStorage._new_shared_filename_cpu(manager, name, size)
    except RuntimeError as error:
        raise FileNotFoundError(
            f"The shared memory {name.decode()} is gone ({error}): keep the module that shared it alive until every "
            "worker has received it, and send it only to processes of the same machine."
        ) from error
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)
