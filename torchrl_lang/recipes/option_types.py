"""How values of each type of option are read from the words of a command line."""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["from_words", "shown", "word_reader"]


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
    return {"type": _path if kind is Path else kind, "metavar": kind.__name__.upper()}


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


def _path(text: str) -> Path:
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
