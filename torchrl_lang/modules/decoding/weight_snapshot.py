"""Detect changes of a model's weights, at less than the cost of reading one token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["WeightSnapshot"]

_ADAPTERS = "_disable_adapters"  # attribute of PEFT layers: whether their adapters are off
_CHUNK = 1 << 22  # number of half-precision entries that are converted to float32 at a time


class WeightSnapshot:
    """Stores properties of modules' weights, and compares them with the current ones.

    Any of these differences counts as a change:

    - the memory, dtype and autograd version counter of each parameter and buffer. They detect an optimizer's step,
      ``load_state_dict`` and ``.to()``, however small the change;
    - the values: vectors themselves, matrices times a fixed random vector. They detect writes through ``.data``, as in
      TorchRL's collectors, or from another process to shared memory. A change of a single weight is detected from a
      relative size of about one unit in the last place of its row's sum;
    - the state of the computation: active PEFT adapters, autocast, inference mode, the precision of matrix products.

    Other settings of modules, and hooks, are not compared. Each weight is read once, as in one decoding step; if
    weights are sharded over processes, each process reads its own part. Synchronizes with the device once.

    Args:
        modules: the modules whose weights are compared.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.weight_snapshot import WeightSnapshot
        >>> net = torch.nn.Linear(3, 2)
        >>> snapshot = WeightSnapshot([net])
        >>> snapshot.unchanged([net])
        True
        >>> _ = net.weight.data[0, 0].add_(1e-3)
        >>> snapshot.unchanged([net])
        False
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._probes: dict[torch.device, Tensor] = {}
        self._modules = list(modules)
        tensors = _tensors(modules)
        self._facts = _facts(modules, tensors)
        self._longest = max((2 * t.numel() // t.shape[0] for t in tensors if t.ndim > 1 and t.numel()), default=0)
        self._values = self._read(tensors)

    def unchanged(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are the same modules with the same weights."""
        if len(modules) != len(self._modules) or not all(map(is_, modules, self._modules)):
            return False
        tensors = _tensors(modules)
        if _facts(modules, tensors) != self._facts:
            return False
        return all(torch.equal(now, then) for now, then in zip(self._read(tensors), self._values, strict=True))

    @torch.no_grad()
    def _read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One vector for each device and dtype."""
        parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        with ExitStack() as full_precision:
            for kind in {tensor.device.type for tensor in tensors}:
                full_precision.enter_context(torch.autocast(kind, enabled=False))
            for tensor in tensors:
                read = self._project(tensor)
                parts.setdefault((read.device, read.dtype), []).append(read)
        return [torch.cat(found) for found in parts.values()]

    def _project(self, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or tensor.numel() == 0:
            return tensor if tensor.ndim == 1 else tensor.reshape(-1)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        matrix = tensor.flatten(1)
        probe = self._probe(matrix.shape[1], tensor.device)
        if matrix.dtype in (torch.float32, torch.float64):
            return matrix.mv(probe.to(matrix.dtype))
        return torch.cat([chunk.float().mv(probe) for chunk in matrix.split(max(_CHUNK // matrix.shape[1], 1))])

    def _probe(self, length: int, device: torch.device) -> Tensor:
        if device not in self._probes:
            drawn = torch.rand(self._longest, generator=torch.Generator().manual_seed(0)) - 0.5
            self._probes[device] = (drawn + drawn.sign() / 2).to(device)  # no entry near zero
        return self._probes[device][:length]


def _tensors(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers, for sharded ones the local part; a module that occurs twice is read once."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _facts(modules: Sequence[nn.Module], tensors: Sequence[Tensor]) -> list[Any]:
    """Properties other than values: of the tensors, and of the computation."""
    facts: list[Any] = [torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()]
    for tensor in tensors:
        version = 0 if tensor.is_inference() else tensor._version
        facts.append((tensor.data_ptr(), version, tensor.dtype, tensor.shape))
    for kind in sorted({tensor.device.type for tensor in tensors}):
        facts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
    layers = [vars(child) for module in modules for child in module.modules() if _ADAPTERS in vars(child)]
    return facts + [(layer[_ADAPTERS], str(layer.get("_active_adapter"))) for layer in layers]
