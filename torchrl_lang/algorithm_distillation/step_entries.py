"""What an observation or an action is made of: numbers from tables, or real numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchrl.data import Categorical, TensorSpec

from torchrl_lang._checks import at_least_one

__all__ = ["Continuous", "Discrete", "Entry", "describe_entry", "entry_from_json", "entry_of_spec"]


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
        if not self.sizes:
            raise ValueError("sizes must have at least one component, got none.")
        for size in self.sizes:
            at_least_one("sizes", size)
        object.__setattr__(self, "sizes", tuple(self.sizes))

    def check(self, name: str, value: Tensor) -> None:
        """Raise ValueError unless the entry holds integers ``[*B, D]`` in their ranges; waits for the device."""
        self._check_shape(name, value)
        if bool(self._outside(value)):
            raise ValueError(
                f"{self._range_of(name)}, got {int(value.min())} to {int(value.max())}: the model has no embeddings of "
                f"other numbers."
            )

    def check_later(self, name: str, value: Tensor) -> None:
        """As :meth:`check`, but numbers out of range raise RuntimeError, on a GPU in a later call: it does not wait."""
        self._check_shape(name, value)
        torch._assert_async(
            ~self._outside(value), f"{self._range_of(name)}: the model has no embeddings of other numbers."
        )

    def _check_shape(self, name: str, value: Tensor) -> None:
        if value.is_floating_point() or value.shape[-1] != len(self.sizes):
            raise ValueError(
                f"'{name}' must be {len(self.sizes)} integers, got {value.dtype} of shape {list(value.shape)}."
            )

    def _outside(self, value: Tensor) -> Tensor:
        """Whether a number is out of range, bool ``[]``."""
        if len(set(self.sizes)) == 1:
            return ((value < 0) | (value >= self.sizes[0])).any()
        # A tensor of the sizes would be copied to the device, which waits for it.
        parts = zip(self.sizes, value.unbind(-1), strict=True)
        return torch.stack([((part < 0) | (part >= size)).any() for size, part in parts]).any()

    def _range_of(self, name: str) -> str:
        return f"'{name}' must be at least 0 and below {self.sizes[0] if len(self.sizes) == 1 else list(self.sizes)}"


@dataclass(frozen=True)
class Continuous:
    """An entry of real numbers, float ``[*B, size]``.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import Continuous
        >>> Continuous(3)
        Continuous(size=3)
    """

    size: int

    def __post_init__(self) -> None:
        at_least_one("size", self.size)

    def check(self, name: str, value: Tensor) -> None:
        """Raise ValueError unless the entry holds real numbers, ``[*B, size]``."""
        if not value.is_floating_point() or value.shape[-1] != self.size:
            raise ValueError(
                f"'{name}' must be a float of {self.size} numbers, got {value.dtype} of shape {list(value.shape)}."
            )

    def check_later(self, name: str, value: Tensor) -> None:
        """The same as :meth:`check`, which does not wait."""
        self.check(name, value)


Entry = Discrete | Continuous


def describe_entry(entry: Entry) -> dict[str, Any]:
    """An entry as JSON, which :func:`entry_from_json` reads."""
    return {"sizes": list(entry.sizes)} if isinstance(entry, Discrete) else {"size": entry.size}


def entry_from_json(content: Mapping[str, Any]) -> Entry:
    """The entry that :func:`describe_entry` described.

    Raises:
        ValueError: this is not the description of an entry.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.step_entries import entry_from_json
        >>> entry_from_json({"size": 3})
        Continuous(size=3)
    """
    sizes = content.get("sizes", [content.get("size")])
    is_known = content.keys() in ({"sizes"}, {"size"}) and isinstance(sizes, list)
    if not is_known or not all(type(size) is int for size in sizes):
        raise ValueError(f"An entry is described by sizes (a list of integers) or a size, got {dict(content)}.")
    return Discrete(sizes) if "sizes" in content else Continuous(sizes[0])


def entry_of_spec(spec: TensorSpec) -> Entry:
    """The entry that a leaf of an environment's specs describes.

    Args:
        spec: of one row, such as ``env.observation_spec_unbatched["observation"]``: integers of equal size, ``[]`` or
            ``[D]``, or reals ``[D]``.

    Raises:
        ValueError: the spec has another kind or shape.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import entry_of_spec
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(9)
        >>> entry_of_spec(env.observation_spec_unbatched["observation"]), entry_of_spec(env.action_spec_unbatched)
        (Discrete(sizes=(9, 9)), Discrete(sizes=(5,)))
    """
    if isinstance(spec, Categorical) and spec.ndim <= 1:
        return Discrete([int(spec.space.n)] * (spec.shape[0] if spec.ndim else 1))
    if spec.dtype.is_floating_point and spec.ndim == 1:
        return Continuous(spec.shape[0])
    raise ValueError(
        f"An entry of a step is a Categorical spec of shape [] or [D], or real numbers [D], got {type(spec).__name__} "
        f"of shape {list(spec.shape)}: convert it with a transform."
    )
