"""Dtypes and devices of numbers: half precision becomes float32 before sums, options follow the data."""

from __future__ import annotations

from torch import Tensor


def upcast_half(values: Tensor) -> Tensor:
    """Convert to at least float32; wider values are returned unchanged."""
    return values.float() if values.dtype.itemsize < 4 else values


def scalar_like(value: Tensor | float, like: Tensor) -> Tensor:
    """A number in the dtype and on the device of ``like``; one of Python is not copied there, which waits for a GPU."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)
