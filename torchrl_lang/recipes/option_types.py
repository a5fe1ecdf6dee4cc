"""How values of each type of option are read: from the words of a command line, and from YAML."""

from __future__ import annotations

import argparse
import json
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["describe_type", "from_words", "read_path", "read_value", "shown", "word_reader"]

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}


def word_reader(kind: Any) -> dict[str, Any]:
    """The arguments of ``add_argument`` for values of a type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) in (Union, types.UnionType):
        return _union_reader(get_args(kind))
    if get_origin(kind) is dict:
        return {"type": _pair, "action": "extend", "nargs": "+", "metavar": "NAME=VALUE"}
    if get_origin(kind) is tuple:
        return {**word_reader(get_args(kind)[0]), "nargs": "*"}
    return {"type": read_path if kind is Path else kind, "metavar": kind.__name__.upper()}


def _union_reader(parts: tuple[Any, ...]) -> dict[str, Any]:
    """Of a type or None, of a choice or None, and of a type or one of some words."""
    choices = [part for part in parts if get_origin(part) is Literal]
    plain = [part for part in parts if part is not type(None) and part not in choices]
    if not plain:
        return word_reader(choices[0])
    words: dict[str, Any] = {word: word for part in choices for word in get_args(part)}
    words |= {"none": None} if type(None) in parts else {}
    read = word_reader(plain[0])["type"]

    def convert(text: str) -> Any:
        return words[text.lower()] if text.lower() in words else read(text)

    convert.__name__ = plain[0].__name__  # argparse shows it where the text is wrong
    return {"type": convert, "metavar": plain[0].__name__.upper()}


def read_path(text: str) -> Path:
    """A path, which must not be empty."""
    if not text:  # pathlib would take it for the current folder
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


def _pair(text: str) -> tuple[str, Any]:
    """The name and the value of ``name=value``, where the value is JSON or else a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    try:
        return name, json.loads(value, parse_constant=_refuse_constant)
    except ValueError:
        return name, value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def from_words(kind: Any, value: Any) -> Any:
    """A value of an option's type from what argparse collected.

    Raises:
        ValueError: a name of ``name=value`` was given twice.
    """
    if get_origin(kind) is dict:
        names = [name for name, _ in value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"The option {twice} was given twice: {', '.join(f'{n}={v}' for n, v in value)}.")
        return dict(value)
    return tuple(value) if isinstance(value, list) else value


def shown(value: Any) -> str:
    """A default in a help text."""
    return (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def read_value(kind: Any, value: Any) -> Any:
    """A value of an option's type from one that YAML gave.

    Raises:
        TypeError: it is of another type.

    Examples:
        >>> from torchrl_lang.recipes.option_types import read_value
        >>> read_value(tuple[float, ...], [1, "1e-3"]), read_value(int | None, "none")
        ((1.0, 0.001), None)
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(parts, value)
    if origin is Literal and isinstance(value, str) and value in parts:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(read_value(parts[0], item) for item in value)
    if origin is dict and isinstance(value, dict) and all(isinstance(name, str) for name in value):
        json.dumps(value, allow_nan=False)  # raises TypeError for dates and the like
        return value
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError):
            return float(value)  # YAML takes numbers such as 1e-3 for texts
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if kind in (bool, int, str) and type(value) is kind:
        return value
    raise TypeError(f"expected {describe_type(kind)}, got {value!r}")


def _read_union(parts: tuple[Any, ...], value: Any) -> Any:
    if type(None) in parts and (value is None or str(value).lower() == "none"):
        return None
    for part in parts:
        with suppress(TypeError):
            return read_value(part, value)
    raise TypeError(f"expected {_describe_union(parts)}, got {value!r}")


def describe_type(kind: Any) -> str:
    """An option's type in words.

    Examples:
        >>> from torchrl_lang.recipes.option_types import describe_type
        >>> describe_type(tuple[float, ...]), describe_type(int | None)
        ('a list, each item a number', 'a whole number or none')
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _describe_union(parts)
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin is tuple:
        return f"a list, each item {describe_type(parts[0])}"
    if origin is dict:
        return "names with JSON values"
    return _NAMES.get(kind, "none")


def _describe_union(parts: tuple[Any, ...]) -> str:
    return " or ".join(describe_type(part) for part in parts)
