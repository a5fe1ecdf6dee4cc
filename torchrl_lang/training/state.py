"""State dicts without pickle: tensors and JSON, and the states of random generators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchrl_lang.modules.sharding import local_part


class RandomState:
    """The states of torch's global generators and of some others, for checkpoints.

    Args:
        generators: further generators by name, such as a replay buffer's or a policy's.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import RandomState
        >>> stream = RandomState(sampler=torch.Generator())
        >>> state = stream.state_dict()
        >>> first = torch.rand(3)
        >>> stream.load_state_dict(state)
        >>> bool((torch.rand(3) == first).all())
        True
    """

    def __init__(self, **generators: torch.Generator) -> None:
        self.generators = generators

    def state_dict(self) -> dict[str, Any]:
        """The state of each generator, as byte tensors."""
        return {
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of every generator.

        Raises:
            KeyError: the state is of other generators than this object's.
            ValueError: it was saved with another number of CUDA devices.
        """
        saved, cuda, devices = state_dict["generators"], state_dict["cuda"], torch.cuda.device_count()
        if saved.keys() != self.generators.keys():
            raise KeyError(f"The state has the generators {sorted(saved)}, expected {sorted(self.generators)}.")
        if cuda and len(cuda) != devices:
            raise ValueError(f"The state is of {len(cuda)} CUDA devices, not {devices}: omit the random state.")
        torch.set_rng_state(state_dict["cpu"])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        for name, generator in self.generators.items():
            generator.set_state(saved[name])


_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_SEQUENCES: dict[str, Any] = {"list": list, "size": torch.Size, "tuple": tuple}
"""Kinds of sequences; a size is a tuple, too."""


class CheckpointError(ValueError):
    """A checkpoint is damaged or does not fit the objects to restore."""


def split_state(state: Any, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state into a JSON tree and the tensors that it names.

    Keys of dicts may be of any plain type (an optimizer's are integers), and tuples stay tuples. Tensors that are the
    same object, such as tied weights, are stored once.

    Args:
        state: nested dicts, lists and tuples of tensors, numbers, strings, booleans, ``None``, dtypes and devices.
        name: prefix of the tensors' names.

    Returns:
        The tree, and CPU tensors by name; sharded ones stay as they are.

    Raises:
        TypeError: there are leaves of other types; the message names the path.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training.state import join_state, split_state
        >>> tree, tensors = split_state({0: torch.ones(2), "betas": (0.9, 0.99)}, "optimizer")
        >>> list(tensors)
        ['optimizer/0']
        >>> join_state(tree, tensors)
        {0: tensor([1., 1.]), 'betas': (0.9, 0.99)}
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def split(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": keep(value.detach(), path)}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}  # not a JSON number
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {"dict": [[split(key, path), split(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = next(name for name, type_ in _SEQUENCES.items() if isinstance(value, type_))
            return {kind: [split(item, f"{path}/{index}") for index, item in enumerate(value)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        remedy = "return tensors, numbers, strings, and dicts, lists or tuples of them"
        raise TypeError(f"The state at '{path}' is a {type(value).__name__}, no part of a checkpoint: {remedy}.")

    def keep(value: Tensor, path: str) -> str:
        part = local_part(value)
        # Not by addresses: in a process that has no part of some weights, these would all be the same.
        same = (part.untyped_storage()._cdata, part.storage_offset(), value.shape, part.stride(), value.dtype)
        if same in seen:
            return seen[same]
        while path in tensors:  # keys such as 0 and "0" have the same path
            path += "'"
        if isinstance(value, DTensor):
            tensors[path] = value
        else:  # a plain copy: safetensors supports neither views of a shared storage nor subclasses
            tensors[path] = value.as_subclass(Tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)
        seen[same] = path
        return path

    return split(state, name), tensors


def join_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Invert :func:`split_state`. All tensors are on the CPU."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {join_state(key, tensors): join_state(item, tensors) for key, item in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](join_state(item, tensors) for item in content)
    makers: dict[str, Any] = {"float": float, "dtype": _DTYPES.__getitem__, "device": torch.device}
    return tensors[content] if kind == "tensor" else makers[kind](content)
