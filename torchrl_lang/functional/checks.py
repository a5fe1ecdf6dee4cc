"""Checks of options, with errors that say what came and what was expected."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["finite", "one_of", "positive", "within"]


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError unless an option is one of the known words."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: {name} must be one of {list(known)}.")


def within(name: str, value: float, low: float, high: float, *, inclusive: bool = True) -> None:
    """Raise ValueError unless an option lies in an interval."""
    if not low <= value <= high or (not inclusive and value in (low, high)):
        interval = f"[{low}, {high}]" if inclusive else f"({low}, {high})"
        raise ValueError(f"{name} must lie in {interval}, got {value}.")


def finite(name: str, value: float, *, low: float | None = 0.0) -> None:
    """Raise ValueError unless an option is a finite number, at least ``low``, which None lifts."""
    if not math.isfinite(value) or (low is not None and value < low):
        bound = "" if low is None else f" of at least {low:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {value}.")


def positive(name: str, value: float) -> None:
    """Raise ValueError unless an option is a finite number above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
