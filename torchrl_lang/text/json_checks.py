"""Checks of values that were read from JSON; the messages name the place and what came."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_lang._files import shorten

__all__ = ["check_keys", "read_flag", "read_number", "show"]


def check_keys(content: Any, known: Sequence[str], where: str) -> None:
    """Raise ValueError unless ``content`` is an object with no other keys than the ``known`` ones."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {show(content)}")
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown keys {shorten(unknown)}, the known ones are {list(known)}")


def read_flag(content: Mapping[str, Any], key: str, *, default: bool) -> bool:
    """A value that is true or false."""
    flag = content.get(key, default)
    if not isinstance(flag, bool):
        raise ValueError(f"'{key}' must be true or false, got {show(flag)}")
    return flag


def read_number(value: Any, what: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{what} must be a finite number, got {show(value)}")
    return float(value)


def show(value: Any) -> str:
    """A value as JSON, shortened; only the beginning of a long text is converted."""
    text = json.dumps(value[:60] if isinstance(value, str) else value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
