"""How much memory a function needs at its worst: every tensor is counted from its birth to its death."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tracker(TorchDispatchMode):
    """Counts the bytes of storages that operations create; storages that came from outside weigh nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            self._watch(leaf, born=False)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            self._watch(leaf, born=True)
        return out

    def _watch(self, leaf: Any, born: bool) -> None:
        if not isinstance(leaf, Tensor):
            return
        storage = leaf.untyped_storage()  # one object per storage, as long as the storage lives
        if storage._cdata in self.known:
            return
        size = storage.nbytes() if born else 0
        self.known.add(storage._cdata)
        weakref.finalize(storage, self._release, storage._cdata, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def peak_bytes(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Bytes of the tensors that ``function`` holds at its worst moment, above what there was before it ran.

    Its result counts, and so does what autograd keeps. On the CPU, what a kernel allocates inside itself is not seen;
    on a CUDA device the allocator counts, which sees all: run the function once before, so that the workspaces which
    libraries keep are there already.

    >>> import torch
    >>> x = torch.zeros(1000)
    >>> peak_bytes(lambda: x + 1), peak_bytes(lambda: x + 1 + 1 + 1), peak_bytes(lambda: x[:10].view(2, 5))
    (4000, 8000, 0)
    """
    if torch.device(device).type == "cuda":
        return _peak_allocated(function, device)
    tracker = _Tracker()
    with tracker:
        function()
    return tracker.peak


def _peak_allocated(function: Callable[[], Any], device: torch.device | str) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
