"""Checks of options, with errors that say what came and what was expected."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["one_of", "within"]


def one_of(name: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError unless an option is one of the known words."""
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown: {name} must be one of {list(known)}.")


def within(name: str, value: float, low: float, high: float, *, inclusive: bool = True) -> None:
    """Raise ValueError unless an option lies in an interval."""
    if not low <= value <= high or (not inclusive and value in (low, high)):
        interval = f"[{low}, {high}]" if inclusive else f"({low}, {high})"
        raise ValueError(f"{name} must lie in {interval}, got {value}.")
