"""The components of an observation or an action: numbers from tables, or real numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrl.data import Categorical, TensorSpec

from torchrl_lang._checks import Count, check_options, checked


@dataclass(frozen=True)
class Discrete:
    """An entry of integers, int64 ``[*B, D]``; an action has one, ``[*B]``.

    Args:
        sizes: the number of values of each of the ``D`` components.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import Discrete
        >>> Discrete([7, 7])
        Discrete(sizes=(7, 7))
    """

    sizes: Sequence[int]

    def __post_init__(self) -> None:
        for size in self.sizes or (0,):
            check_options(sizes=(size, 1))
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def check(self, name: str, value: Tensor, *, wait: bool = True) -> None:
        """Raise ValueError unless the entry holds integers ``[*B, D]`` in their ranges.

        Without ``wait`` numbers out of range raise RuntimeError, on a GPU in a later call: it is not waited for.
        """
        if value.is_floating_point() or value.shape[-1] != len(self.sizes):
            raise ValueError(f"'{name}' must be {len(self.sizes)} integers, got {value.dtype} {list(value.shape)}.")
        # A tensor of the sizes would be copied to the device, which waits for it.
        parts = zip(self.sizes, value.unbind(-1), strict=True)
        outside = torch.stack([((part < 0) | (part >= size)).any() for size, part in parts]).any()
        limits = self.sizes[0] if len(self.sizes) == 1 else list(self.sizes)
        expected = f"'{name}' must be at least 0 and below {limits}"
        if not wait:
            torch._assert_async(~outside, expected)
        elif outside:
            raise ValueError(f"{expected}, got {int(value.min())} to {int(value.max())}: the model has no others.")


@checked
@dataclass(frozen=True)
class Continuous:
    """An entry of real numbers, float ``[*B, size]``.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import Continuous
        >>> Continuous(3)
        Continuous(size=3)
    """

    size: Count


Entry = Discrete | Continuous


def entry_of_spec(spec: TensorSpec) -> Entry:
    """The entry of a leaf of an environment's specs: integers of equal size, ``[]`` or ``[D]``, or reals ``[D]``.

    Raises:
        ValueError: the spec has another kind or shape.
    """
    if isinstance(spec, Categorical) and spec.ndim <= 1:
        return Discrete([int(spec.space.n)] * (spec.shape[0] if spec.ndim else 1))
    if spec.dtype.is_floating_point and spec.ndim == 1:
        return Continuous(spec.shape[0])
    found = f"{type(spec).__name__} of shape {list(spec.shape)}"
    raise ValueError(f"A step has Categorical specs of shape [] or [D], or real numbers [D], got {found}.")
