"""Typed options: a dataclass is a recipe's configuration, its command line and its record on disk."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from torchrl_lang.recipes.ranges import Range, check_ranges

if TYPE_CHECKING:  # it imports torch, for which `--help` shall not wait
    from torchrl_lang.storage import Fields

__all__ = [
    "RECORD_VERSION",
    "Options",
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


RECORD_VERSION = 1
"""Of the record that :func:`write_options` writes; a record without a version is of this one."""


class Options:
    """Base of every recipe's dataclass: values are checked when one is made, from the command line or in Python.

    Examples:
        >>> import dataclasses
        >>> from torchrl_lang.recipes.options import Options, option
        >>> @dataclasses.dataclass(frozen=True)
        ... class Training(Options):
        ...     steps: int = option(10, "steps to train", at_least=1)
        >>> Training(steps=0)
        Traceback (most recent call last):
            ...
        ValueError: steps must be at least 1, got 0.
    """

    def __post_init__(self) -> None:
        check_ranges(self)


def option(default: Any, text: str, **ends: float) -> Any:
    """A dataclass field with a default, a line of help, and the ends of its :class:`Range`."""
    return dataclasses.field(default=default, metadata={"help": text, "range": Range(**ends)})


def required(text: str) -> Any:
    """A dataclass field that the command line must give."""
    return dataclasses.field(metadata={"help": text})


@dataclass_transform(frozen_default=True)
def with_defaults(**defaults: Any) -> Callable[[type[T]], type[T]]:
    """Make a frozen dataclass of a class that changes defaults of its base's fields; help, range and order stay.

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
            setattr(cls, name, dataclasses.field(default=default, metadata=fields[name].metadata))
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
            allowed = field.metadata.get("range", Range())
            ends = "" if allowed == Range() else f"; {allowed}"
            settings["help"] += f" (default: {_shown(field.default)}{ends})"
        settings |= _reader(hints[field.name])
        if settings.get("nargs") == "*" and field.default:
            settings["nargs"] = "+"
        parser.add_argument(flag, **settings)


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
    return {"type": _path if kind is Path else kind, "metavar": kind.__name__.upper()}


def _path(text: str) -> Path:
    if not text:  # which pathlib takes for the current folder
        raise argparse.ArgumentTypeError("expected a path, got an empty text")
    return Path(text)


def _shown(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def options_from(options: type[T], arguments: argparse.Namespace) -> T:
    """The dataclass from parsed arguments."""
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def write_options(path: Path, options: Any, **more: Any) -> None:
    """Record options, and whatever else makes a run what it is, as JSON."""
    from torchrl_lang.storage import write_file

    record = {"version": RECORD_VERSION, **_plain(options), **more}
    write_file(path, json.dumps(record, indent=2, default=str) + "\n")


def read_options(path: Path) -> Fields:
    """Read what :func:`write_options` wrote.

    Raises:
        FileNotFoundError: there is no run.
        FileError: the record is damaged, or a newer version of this library wrote it.
    """
    from torchrl_lang.storage import Fields

    if not path.exists():
        raise FileNotFoundError(f"There is no run in {path.parent}: {path.name} is missing. Train one there first.")
    remedy = (
        f"give the folder of a run; if {path.parent} is one, put the file back as it was or train in another folder"
    )
    record = Fields.read(path, remedy=remedy)
    version = record.take("version", int, RECORD_VERSION)
    if version != RECORD_VERSION:
        raise record.error(f"is a record of version {version}, this version of the library reads {RECORD_VERSION}")
    return record


def check_record(path: Path, options: Any, *, free: tuple[str, ...] = (), **more: Any) -> None:
    """Raise unless a run that is to be continued is what it began as; ``free`` options may differ.

    Raises:
        ValueError: naming what differs.
    """
    from torchrl_lang.storage.errors import shorten

    before = read_options(path).content
    now = json.loads(json.dumps(_plain(options) | more, default=str))
    # An option that is younger than the run had the effect of its default.
    defaults = json.loads(json.dumps({field.name: field.default for field in dataclasses.fields(options)}, default=str))
    changed = [key for key, value in now.items() if before.get(key, defaults.get(key)) != value and key not in free]
    if changed:
        # The values of options are short, the checksums of a data set are not.
        shown = [
            key if key in more else f"{key} was {shorten(before.get(key))} and is {shorten(now[key])}"
            for key in changed
        ]
        raise ValueError(
            f"{path.parent} holds a run with other options: {', '.join(shown)}. Give another --out, or delete it."
        )


def _plain(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
