"""Checks of options whose errors give the value and the expected range."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence

from torch import Tensor


def check_options(**options: tuple[object, str | int | Collection[object]]) -> None:
    """Raise ValueError unless all options have an allowed value, given beside it; None is always allowed.

    A text is an interval of finite numbers, an integer the least of integers, and a collection has the allowed values.

    Examples:
        >>> from torchrl_lang._checks import check_options
        >>> check_options(gamma=(0.9, "[0, 1]"), weight=(0.0, "[0, inf)"), heads=(2, 1), target=("td", ("td", "mc")))
        >>> check_options(expectile=(1.0, "(0, 1)"))
        Traceback (most recent call last):
            ...
        ValueError: expectile must lie in (0, 1), got 1.0.
    """
    for name, (value, allowed) in options.items():
        if value is None:
            continue
        if isinstance(allowed, str):
            good, expected = _lies_in(value, allowed), f"lie in {allowed}"
        elif isinstance(allowed, int):
            good, expected = _is_integer(value) and value >= allowed, f"be an integer of at least {allowed}"  # type: ignore[operator]
        else:
            good, expected = value in allowed, f"be one of {list(allowed)}"
        if not good:
            raise ValueError(f"{name} must {expected}, got {value!r}.")


def _lies_in(value: object, interval: str) -> bool:
    """Whether a finite number lies in an interval such as ``(0, 1]``."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    low, high = map(float, interval[1:-1].split(","))
    above = number > low if interval[0] == "(" else number >= low
    return math.isfinite(number) and above and (number < high if interval[-1] == ")" else number <= high)


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
