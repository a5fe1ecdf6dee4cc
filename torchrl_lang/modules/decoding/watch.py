"""Whether a model still computes what it computed before: a look at its weights, cheap beside reading one token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ModelWatch"]

# Entries of a module that do not bear on what it computes in evaluation mode.
_UNRELATED = frozenset(
    {
        "training",
        "_parameters",  # looked at by themselves, like the children
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_backward_pre_hooks",
        "_backward_hooks",
        "_is_full_backward_hook",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_pre_norm",
    }
)
_PIECE = 1 << 22  # entries of half precision that are raised to float32 at a time
_PLAIN = frozenset({type(None), bool, int, float, str})
_DEPTH = 3  # of containers in containers


class ModelWatch:
    """Remembers how modules stood when it was made and says whether they still do.

    Three signs, any of which counts:

    - where each parameter and buffer lies, its dtype, and how often autograd saw it written to. An optimiser's step,
      ``load_state_dict`` and ``.to()`` show here, however small the change;
    - the values: vectors themselves, matrices times a fixed random vector. Writing through ``.data``, as TorchRL's
      collectors do, or from another process into shared memory, leaves no other trace. A change of a single weight
      shows from a relative size of about one unit in the last place of its row's sum on;
    - plain settings of the modules (numbers, strings, containers of such, forward hooks), so that adapters that are
      switched or merged show; autocast, inference mode and the precision of matrix products.

    Each weight is read once, as one decoding step does. Waits once for the device.

    Args:
        modules: whose function in evaluation mode is watched.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding.watch import ModelWatch
        >>> net = torch.nn.Linear(3, 2)
        >>> watch = ModelWatch([net])
        >>> watch.unchanged([net])
        True
        >>> _ = net.weight.data[0, 0].add_(1e-3)
        >>> watch.unchanged([net])
        False
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._probes: dict[torch.device, Tensor] = {}
        self._roots = list(modules)
        self._stands = [_Stand(child) for module in modules for child in module.modules()]
        tensors = self._tensors()
        self._facts = _facts(tensors)
        self._longest = max((2 * t.numel() // t.shape[0] for t in tensors if t.ndim > 1 and t.numel()), default=0)
        self._values = self._read(tensors)

    def unchanged(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are the modules as they were."""
        if not _same(modules, self._roots) or not all(stand.holds() for stand in self._stands):
            return False
        tensors = self._tensors()
        if _facts(tensors) != self._facts:
            return False
        return all(torch.equal(now, then) for now, then in zip(self._read(tensors), self._values, strict=True))

    def _tensors(self) -> list[Tensor]:
        return [tensor for stand in self._stands for tensor in stand.tensors()]

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
        return torch.cat([piece.float().mv(probe) for piece in matrix.split(max(_PIECE // matrix.shape[1], 1))])

    def _probe(self, length: int, device: torch.device) -> Tensor:
        if device not in self._probes:
            drawn = torch.rand(self._longest, generator=torch.Generator().manual_seed(0)) - 0.5
            self._probes[device] = (drawn + drawn.sign() / 2).to(device)  # no entry near zero
        return self._probes[device][:length]


class _Itself:
    """Equal to itself alone; held, so that nothing else can take its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value


class _Stand:
    """One module as it stood: its children and settings."""

    __slots__ = ("attention", "children", "holding", "kind", "module", "settings", "size")

    def __init__(self, module: nn.Module) -> None:
        entries = vars(module)
        self.module, self.kind, self.size = module, type(module), len(entries)
        self.children = list(entries["_modules"].values())
        related = [(key, value) for key, value in entries.items() if key not in _UNRELATED]
        self.settings = [(key, value, _plain(value)) for key, value in related]
        self.holding = [key for key, value in related if isinstance(value, Tensor)]
        self.attention = self._attention()

    def holds(self) -> bool:
        """Whether it still stands so."""
        entries = vars(self.module)
        if (
            type(self.module) is not self.kind
            or len(entries) != self.size
            or not _same(entries["_modules"].values(), self.children)
        ):
            return False
        for key, then, facts in self.settings:
            now = entries.get(key, _Itself)
            # Most are the very object that they were: one whose content cannot change or is not looked at, or a
            # container that was empty, such as the hooks, and is so still.
            if now is then and (type(facts) is not tuple or not (facts or now)):
                continue
            if _plain(now) != facts:
                return False
        return self._attention() == self.attention

    def tensors(self) -> list[Tensor]:
        """All that it computes with."""
        entries = vars(self.module)
        own = [*entries["_parameters"].values(), *entries["_buffers"].values()]
        return [entries[key] for key in self.holding] + [tensor for tensor in own if tensor is not None]

    def _attention(self) -> Any:
        return getattr(vars(self.module).get("config"), "_attn_implementation", None)


def _same(modules: Collection[nn.Module | None], others: Collection[nn.Module | None]) -> bool:
    return len(modules) == len(others) and all(map(is_, modules, others))


def _facts(tensors: Sequence[Tensor]) -> list[Any]:
    """What is known without looking at values: of the tensors, and of how they are computed with."""
    facts: list[Any] = [torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()]
    for tensor in tensors:
        version = 0 if tensor.is_inference() else tensor._version
        facts.append((tensor.data_ptr(), version, tensor.dtype, tensor.shape))
    for kind in sorted({tensor.device.type for tensor in tensors}):
        facts += [torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)]
    return facts


def _plain(value: Any, depth: int = _DEPTH) -> Any:
    """What can be compared of a setting: plain values themselves, containers of them, the identity of the rest."""
    if type(value) in _PLAIN:
        return value
    if depth and isinstance(value, dict):
        return tuple((key, _plain(item, depth - 1)) for key, item in value.items()) if value else ()
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return tuple(_plain(item, depth - 1) for item in value)
    return _Itself(value)
