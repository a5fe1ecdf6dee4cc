"""Checks of the numbers that controllers get."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

__all__ = ["above_zero", "at_least_zero", "finite", "scalar"]

_FLOAT32 = torch.finfo(torch.float32)


def scalar(value: float) -> Tensor:
    """A buffer of one number, float32 ``[]``."""
    # On the CPU even inside torch.device(...), which code that builds a model on a GPU or on "meta" may set.
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def finite(value: Tensor | float, name: str) -> float:
    """Convert a value to a float; errors refer to it as ``name``."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}: take its mean.")
        value = float(value.detach())
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a tensor of one, got {type(value).__name__} {value!r}.")
    if not math.isfinite(value) or abs(value) > _FLOAT32.max:
        raise ValueError(f"{name} must be finite in float32, got {value}.")
    return float(value)


def at_least_zero(value: Tensor | float, name: str) -> float:
    """Convert a value to a float, which must not be negative."""
    number = finite(value, name)
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {number}.")
    return number


def above_zero(value: Tensor | float, name: str) -> float:
    """Convert a value to a float, which must be positive in float32."""
    number = finite(value, name)
    if number < _FLOAT32.tiny:
        raise ValueError(f"{name} must be above 0 in float32, got {number}.")
    return number
