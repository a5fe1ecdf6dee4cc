"""Checks of options whose errors give the value and the expected range."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from torch import Tensor

__all__ = ["at_least_one", "check_heads", "count", "finite", "have_shapes", "one_of", "positive", "within"]


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError unless an option has one of the known values."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: {name} must be one of {list(known)}.")


def within(name: str, value: float, low: float, high: float, *, inclusive: bool = True) -> None:
    """Raise ValueError unless an option lies in an interval."""
    if not low <= value <= high or (not inclusive and value in (low, high)):
        interval = f"[{low}, {high}]" if inclusive else f"({low}, {high})"
        raise ValueError(f"{name} must lie in {interval}, got {value}.")


def finite(name: str, value: float, *, low: float | None = 0.0) -> None:
    """Raise ValueError unless an option is a finite number of at least ``low``; None means no lower bound."""
    if not math.isfinite(value) or (low is not None and value < low):
        bound = "" if low is None else f" of at least {low:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {value}.")


def at_least_one(name: str, value: int) -> None:
    """Raise ValueError unless a number of something is an integer of at least 1."""
    count(name, value, low=1)


def count(name: str, value: int, *, low: int = 0) -> None:
    """Raise ValueError unless a number of something is an integer of at least ``low``, of Python or NumPy."""
    if not _is_integer(value):
        raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}.")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}.")


def _is_integer(value: object) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool)
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError unless the hidden size of a model can be shared out to its attention heads."""
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}.")


def have_shapes(*expected: tuple[str, Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless each named tensor that is given has the shape beside it."""
    for name, given, shape in expected:
        if given is not None and given.shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(given.shape)}.")


def positive(name: str, value: float) -> None:
    """Raise ValueError unless an option is a finite number above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
