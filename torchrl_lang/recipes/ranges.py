"""Ranges of numeric options: declared beside the default, checked in one place."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["Range", "check_ranges", "check_value"]

_LARGEST = 2**31 - 1
"""Upper bound of integers without another one; larger sizes, counts or seeds are typing errors."""


@dataclasses.dataclass(frozen=True)
class Range:
    """An interval of numbers.

    Args:
        at_least, above: the lower end, itself allowed or not.
        at_most, below: the upper end, itself allowed or not.

    Examples:
        >>> from torchrl_lang.recipes.ranges import Range
        >>> str(Range(above=0, at_most=1)), 1.0 in Range(above=0, at_most=1), float("nan") in Range()
        ('above 0 and at most 1', True, False)
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        ends = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{name} {end}" for name, end in ends.items() if end is not None) or "finite"


def check_ranges(options: Any) -> None:
    """Raise if a number or a choice among the fields of a dataclass is not allowed.

    Numbers must be finite and lie in the field's :class:`Range`; so must each item of a tuple. A tuple whose
    default is not empty must not be empty.

    Raises:
        ValueError: with the field, its value and what is allowed.
    """
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        check_value(field, getattr(options, field.name), hints[field.name])


def check_value(field: dataclasses.Field, value: Any, hint: Any) -> None:
    """Raise ValueError unless the value of one field, of the type ``hint``, is allowed; see :func:`check_ranges`."""
    if isinstance(value, tuple) and not value and field.default:
        raise ValueError(f"{field.name} must hold at least one value, got none.")
    for item in value if isinstance(value, tuple) else (value,):
        _check_choice(field.name, item, hint)
        _check_number(field.name, item, field.metadata.get("range", Range()))


def _check_number(name: str, value: Any, allowed: Range) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if isinstance(value, int) and allowed.at_most is None and allowed.below is None and value > _LARGEST:
        allowed = dataclasses.replace(allowed, at_most=_LARGEST)
    if value not in allowed:
        finite = "" if math.isfinite(value) or allowed == Range() else "finite, "
        raise ValueError(f"{name} must be {finite}{allowed}, got {value}.")


def _check_choice(name: str, value: Any, hint: Any) -> None:
    allowed = _leaves(hint)
    choices = [leaf for leaf in allowed if not isinstance(leaf, type)]
    if choices and value is not None and value not in choices and type(value) not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}.")


def _leaves(hint: Any) -> tuple[Any, ...]:
    """Classes and choices inside a type, such as ``float`` and "auto" in ``tuple[float | Literal["auto"], ...]``."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(leaf for part in get_args(hint) if part is not ... for leaf in _leaves(part)) or (hint,)
