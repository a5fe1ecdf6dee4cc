"""Lower blocks of a model that never change: the models below and above them, and whose states rows carry."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from torchrl_lang.modules.hugging_face import FINAL_NORMS, is_adapter
from torchrl_lang.schema import TOKENS

_START = os.urandom(8).hex()
_numbers, _next = WeakTensorKeyDictionary(), count()  # by weight: its memory, and a number for that


def block_list(model: Any) -> tuple[str, nn.ModuleList]:
    """The transformer blocks of a model without its head, its one list of ``num_hidden_layers`` modules, and its name.

    Raises:
        ValueError: there is no such list, or more than one.
    """
    depth = model.config.num_hidden_layers
    found = list(_lists_of(model, depth))
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__} has {len(found)} lists of {depth} modules, expected one.")
    return found[0]


def _lists_of(module: nn.Module, length: int) -> Iterator[tuple[str, nn.ModuleList]]:
    """Outermost lists of that length: a block may contain lists, e.g. of experts."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == length:
            yield name, child
        else:
            yield from ((f"{name}.{inner}", blocks) for inner, blocks in _lists_of(child, length))


def frozen_blocks(model: Any) -> int:
    """The number of a headless model's lowest blocks that never change, nor what is before them.

    No weight there trains, and nothing there has adapters, which can be switched off, even if these are frozen.

    Raises:
        ValueError: the blocks are not found.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, train_top_layers
        >>> from torchrl_lang.modules.frozen.frozen_states import frozen_blocks
        >>> lm = causal_lm("llama", vocab_size=11, layers=3, width=8, heads=2, max_length=16)
        >>> _ = train_top_layers(lm, 1)
        >>> frozen_blocks(lm.base_model)
        2
    """
    path, blocks = block_list(model)
    above = tuple(f"{name}." for name in (path, *FINAL_NORMS))
    before = [module for name, module in model.named_modules() if not f"{name}.".startswith(above)]
    if any(map(_changes, lower_weights(model, 0))) or any(map(is_adapter, before)):
        return 0
    changes = [any(map(_changes, block.parameters())) or any(map(is_adapter, block.modules())) for block in blocks]
    return [*changes, True].index(True)


def states_name(model: Any, blocks: int) -> str | None:
    """A name for the output of the lowest ``blocks`` of a headless model; None if their weights train.

    It is the same while these are the same tensors, unchanged, with the same autocast: for the model and for copies
    that share them, in this process. Moves such as ``.to(dtype)`` and other memory behind ``.data`` are noticed, writes
    into the same memory through ``.data`` are not.
    """
    weights = lower_weights(model, blocks)
    if any(map(_changes, weights)):
        return None
    autocast = autocast_of(weights[0].device)
    known = tuple((_number(w), w._version, w.data_ptr(), str(w.dtype), str(w.device)) for w in weights)
    return f"{blocks}_{hash((known, str(autocast))):x}_{_START}{os.getpid():x}"


def carried(name: str, states: Tensor, tokens: Tensor, mask: Tensor) -> TensorDict:
    """Name states ``[*B, T, H]`` as rows carry them, beside the tokens ``[*B, T]`` plus one, 0 outside the mask."""
    entries = {"states": states, TOKENS: (tokens + 1) * mask}
    return TensorDict({name: entries}, batch_size=tokens.shape[:-1])


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on a device, where it is on."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _changes(weight: Tensor) -> bool:
    """Whether a weight trains, or has no version counter, so that writes are not noticed."""
    return weight.requires_grad or weight.is_inference()


def _number(weight: Tensor) -> int:
    """The number of a weight's memory, another one if it gets other memory, even at the same address."""
    memory = StorageWeakRef(weight.untyped_storage())
    if weight not in _numbers or _numbers[weight][0] != memory:
        _numbers[weight] = memory, next(_next)
    return int(_numbers[weight][1])


def lower_part(model: Any, blocks: int) -> Any:
    """The lowest ``blocks`` of a headless model, without its final norm; all modules are the model's own."""
    path, found = block_list(model)
    norms = {name: nn.Identity() for name in dict(model.named_modules()) if name in FINAL_NORMS}
    return _with(model, {path: found[:blocks], **norms}, slice(blocks))


def upper_part(model: Any, blocks: int) -> Any:
    """A headless model without its lowest ``blocks``, which reads their output; all modules are the model's own."""
    path, found = block_list(model)
    learned = {"wpe": _Zero()} if hasattr(model, "wpe") else {}  # its positions are in the states already
    return _with(model, {path: found[blocks:], **learned}, slice(blocks, None))


def lower_weights(model: Any, blocks: int) -> list[Tensor]:
    """The weights of the lowest blocks and of what is before all blocks."""
    path, found = block_list(model)
    above = {f"{path}.{number}" for number in range(blocks, len(found))} | set(FINAL_NORMS)
    prefixes = tuple(f"{name}." for name in above)
    return [weight for name, weight in model.named_parameters() if not name.startswith(prefixes)]


def _with(model: Any, modules: dict[str, nn.Module], layers: slice) -> Any:
    """A shallow copy of a model with other modules at some paths, and the kinds of the ``layers`` that it keeps."""
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    if getattr(getattr(model, "config", None), "layer_types", None):
        twin.config = copy.copy(model.config)
        twin.config.layer_types = model.config.layer_types[layers]
    for path, module in modules.items():
        name, _, rest = path.partition(".")
        twin._modules[name] = _with(twin._modules[name], {rest: module}, layers) if rest else module
    return twin


class _Zero(nn.Module):
    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)
