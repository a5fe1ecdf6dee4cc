"""State dicts as tensors and JSON: the shape in which a checkpoint holds them, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["join_state", "split_state"]


def split_state(state: Any, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Split a nested state into a JSON tree and the tensors that it names.

    Dicts may have keys of any plain kind (an optimiser's are integers), and tuples stay tuples. Tensors that are one
    and the same, such as tied weights, are kept once.

    Args:
        state: nested dicts, lists and tuples of tensors, numbers, strings, booleans, ``None``, dtypes and devices.
        name: prefix of the tensors' names.

    Returns:
        The tree, and CPU tensors by name.

    Raises:
        TypeError: something else is among the leaves; the message says where.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import join_state, split_state
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
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {"dict": [[split(key, path), split(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [split(item, f"{path}/{index}") for index, item in enumerate(value)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise TypeError(
            f"The state at '{path}' is a {type(value).__name__}, which a checkpoint cannot hold: state_dict() should "
            "return tensors, numbers, strings, and dicts, lists or tuples of them."
        )

    def keep(value: Tensor, path: str) -> str:
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if value.numel() and same in seen:
            return seen[same]
        while path in tensors:  # keys such as 0 and "0" read alike
            path += "'"
        # A plain copy: safetensors takes neither views of a shared storage nor subclasses.
        tensors[path] = value.as_subclass(Tensor).to("cpu", copy=True, memory_format=torch.contiguous_format)
        seen[same] = path
        return path

    return split(state, name), tensors


def join_state(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put together again what :func:`split_state` took apart. All tensors are on the CPU."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {join_state(key, tensors): join_state(item, tensors) for key, item in content}
    if kind == "size":
        return torch.Size(content)
    if kind in ("list", "tuple"):
        items = [join_state(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    raise ValueError(f"Unknown kind of state {kind!r}: the checkpoint was written by a newer version.")
