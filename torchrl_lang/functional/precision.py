"""Half precision raised where numbers are summed."""

from __future__ import annotations

from torch import Tensor

__all__ = ["widened"]


def widened(values: Tensor) -> Tensor:
    """At least float32; wider values stay as they are.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.precision import widened
        >>> widened(torch.zeros(1, dtype=torch.bfloat16)).dtype, widened(torch.zeros(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return values.float() if values.dtype.itemsize < 4 else values
