"""Metrics of a step as plain numbers, with one synchronization per device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["Scalar", "to_scalars"]

Scalar = int | float


def to_scalars(figures: Mapping[str, Any] | TensorDictBase) -> dict[str, Scalar]:
    """Convert numbers and one-element tensors to plain numbers; tensors are copied together, once per device.

    Nested entries of a tensordict are named ``outer/inner``.

    Raises:
        ValueError: a tensor has more than one element.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import to_scalars
        >>> to_scalars({"loss": torch.tensor(0.5), "solved": torch.tensor([3]), "rate": 0.25})
        {'loss': 0.5, 'solved': 3, 'rate': 0.25}
    """
    if isinstance(figures, TensorDictBase):
        figures = {str(key): value for key, value in figures.flatten_keys("/").items()}
    tensors = {key: value.detach() for key, value in figures.items() if isinstance(value, Tensor)}
    for key, value in tensors.items():
        if value.numel() != 1:
            raise ValueError(f"'{key}' has shape {tuple(value.shape)}, but a metric is one number: use its mean.")
    fetched: dict[str, float] = {}
    for device in {value.device for value in tensors.values()}:
        here = {key: value for key, value in tensors.items() if value.device == device}
        numbers = torch.stack([value.reshape(()).to(torch.float64) for value in here.values()]).tolist()
        fetched |= dict(zip(here, numbers, strict=True))
    return {key: _plain(value, fetched.get(key)) for key, value in figures.items()}


def _plain(value: Any, fetched: float | None) -> Scalar:
    if fetched is None:
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else float(value)
    is_whole = not value.is_floating_point() and value.dtype != torch.bool
    return int(fetched) if is_whole else fetched
