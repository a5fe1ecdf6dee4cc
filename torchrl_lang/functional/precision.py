"""Convert half precision to float32 before sums."""

from __future__ import annotations

from torch import Tensor

__all__ = ["upcast_half"]


def upcast_half(values: Tensor) -> Tensor:
    """Convert to at least float32; wider values are returned unchanged."""
    return values.float() if values.dtype.itemsize < 4 else values
