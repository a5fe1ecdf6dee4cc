"""Convert half precision to float32 before sums."""

from __future__ import annotations

from torch import Tensor

__all__ = ["upcast_half"]


def upcast_half(values: Tensor) -> Tensor:
    """Convert to at least float32; wider values are returned unchanged.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.precision import upcast_half
        >>> [upcast_half(torch.zeros(1, dtype=dtype)).dtype for dtype in (torch.bfloat16, torch.float64)]
        [torch.float32, torch.float64]
    """
    return values.float() if values.dtype.itemsize < 4 else values
