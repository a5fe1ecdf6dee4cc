"""Typed options: a dataclass is a recipe's configuration, its command line and its record on disk."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

__all__ = [
    "add_options",
    "check_record",
    "option",
    "options_from",
    "read_options",
    "required",
    "with_defaults",
    "write_options",
]

T = TypeVar("T")


def option(default: Any, text: str) -> Any:
    """A dataclass field with a default and a line of help."""
    return dataclasses.field(default=default, metadata={"help": text})


def required(text: str) -> Any:
    """A dataclass field that the command line must give."""
    return dataclasses.field(metadata={"help": text})


@dataclass_transform(frozen_default=True)
def with_defaults(**defaults: Any) -> Callable[[type[T]], type[T]]:
    """Make a frozen dataclass of a class that changes defaults of its base's fields; help and order stay the base's.

    Raises:
        TypeError: the base has no such field.

    Examples:
        >>> import dataclasses
        >>> from torchrl_lang.recipes.options import option, with_defaults
        >>> @dataclasses.dataclass(frozen=True)
        ... class Options:
        ...     steps: int = option(10, "steps to train")
        >>> @with_defaults(steps=20)
        ... class Longer(Options):
        ...     every: int = option(5, "steps between evaluations")
        >>> Longer(), dataclasses.fields(Longer)[0].metadata["help"]
        (Longer(steps=20, every=5), 'steps to train')
    """

    def decorate(cls: type[T]) -> type[T]:
        fields, hints = {field.name: field for field in dataclasses.fields(cls)}, get_type_hints(cls)  # type: ignore[arg-type]
        unknown = sorted(defaults.keys() - fields.keys())
        if unknown:
            raise TypeError(f"{cls.__name__} changes defaults of {unknown}, its base has {list(fields)}.")
        cls.__annotations__ = inspect.get_annotations(cls) | {name: hints[name] for name in defaults}
        for name, default in defaults.items():
            setattr(cls, name, option(default, fields[name].metadata["help"]))
        return dataclasses.dataclass(frozen=True)(cls)

    return decorate


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Give ``parser`` a ``--name`` for every field of a dataclass: its type, default and help.

    Examples:
        >>> import argparse, dataclasses
        >>> from torchrl_lang.recipes.options import add_options, option, options_from
        >>> @dataclasses.dataclass
        ... class Options:
        ...     steps: int = option(10, "steps to train")
        >>> parser = argparse.ArgumentParser()
        >>> add_options(parser, Options)
        >>> options_from(Options, parser.parse_args(["--steps", "3"]))
        Options(steps=3)
    """
    hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata.get("help", "")
        needed = field.default is dataclasses.MISSING
        settings: dict[str, Any] = {"help": text, "dest": field.name}
        if needed:
            settings["required"] = True
        else:
            settings["default"] = field.default
            settings["help"] += f" (default: {_shown(field.default)})"
        parser.add_argument(flag, **settings, **_reader(hints[field.name]))


def _reader(kind: Any) -> dict[str, Any]:
    """What argparse needs to read a value of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) in (Union, types.UnionType):
        inner = next(part for part in get_args(kind) if part is not type(None))
        if get_origin(inner) is Literal:
            return _reader(inner)
        read = _reader(inner)["type"]
        return {"type": lambda text: None if text.lower() == "none" else read(text), "metavar": inner.__name__.upper()}
    if get_origin(kind) is tuple:
        return {**_reader(get_args(kind)[0]), "nargs": "*"}
    return {"type": kind, "metavar": kind.__name__.upper()}


def _shown(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def options_from(options: type[T], arguments: argparse.Namespace) -> T:
    """The dataclass from parsed arguments."""
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def write_options(path: Path, options: Any, **more: Any) -> None:
    """Record options, and whatever else makes a run what it is, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(json.dumps(_plain(options) | more, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_options(path: Path) -> dict[str, Any]:
    """What :func:`write_options` wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no run in {path.parent}: {path.name} is missing. Train one there first.")
    return json.loads(path.read_text(encoding="utf-8"))


def check_record(path: Path, options: Any, *, free: tuple[str, ...] = (), **more: Any) -> None:
    """Raise unless a run that is to be continued is what it began as; ``free`` options may differ.

    Raises:
        ValueError: naming what differs.
    """
    before = read_options(path)
    now = json.loads(json.dumps(_plain(options) | more, default=str))
    # An option that is younger than the run had the effect of its default.
    defaults = json.loads(json.dumps({field.name: field.default for field in dataclasses.fields(options)}, default=str))
    changed = [key for key, value in now.items() if before.get(key, defaults.get(key)) != value and key not in free]
    if changed:
        # What is short is shown, a data set's checksums are not.
        told = [f"{key} was {before.get(key)!r} and is {now[key]!r}" if key not in more else key for key in changed]
        raise ValueError(
            f"{path.parent} holds a run with other options: {', '.join(told)}. Give another --out, or delete it."
        )


def _plain(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
