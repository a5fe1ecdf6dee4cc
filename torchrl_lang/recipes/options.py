"""Typed options: a dataclass is a recipe's configuration, its command line and its record on disk."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, dataclass_transform, get_type_hints

from torchrl_lang.recipes.option_types import from_words, read_path, shown, word_reader
from torchrl_lang.recipes.ranges import Range, check_ranges

if TYPE_CHECKING:  # these import torch, and `--help` must not wait for torch
    from torchrl_lang._files import Fields
    from torchrl_lang.recipes.tasks.base import Task

__all__ = [
    "Options",
    "add_options",
    "check_record",
    "option",
    "options_from",
    "pairs",
    "read_options",
    "required",
    "with_defaults",
    "write_options",
]

T = TypeVar("T")

_VERSION = 1
"""Version of the record that :func:`write_options` writes; a record without a version has this one."""
_CHECKSUM = "checksum"


class Options:
    """Base of the option dataclasses of all recipes. Values are checked on construction.

    Examples:
        >>> import dataclasses
        >>> from torchrl_lang.recipes.options import Options, option
        >>> @dataclasses.dataclass(frozen=True)
        ... class Training(Options):
        ...     steps: int = option(10, "training steps", at_least=1)
        >>> Training(steps=0)
        Traceback (most recent call last):
            ...
        ValueError: steps must be at least 1, got 0.
    """

    preset: ClassVar[str] = ""
    """Name under which a task keeps option values for this recipe in :attr:`Task.presets`."""

    own_preset: ClassVar[str] = ""
    """Likewise for this recipe alone; these values count more than those of :attr:`preset`."""

    defining: ClassVar[tuple[str, ...]] = ()
    """Options whose values make a variant of an algorithm what it is: presets of tasks do not change them."""

    task_from: ClassVar[tuple[str, str] | None] = None
    """An option with a folder, and the file there that names the task."""

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def for_task(cls, task: Task | type[Task], /, **given: Any) -> Self:
        """Options for a task: ``given`` values first, then the task's preset, then the defaults."""
        return cls(**{**cls.preset_of(task), **given})

    @classmethod
    def preset_of(cls, task: Task | type[Task]) -> dict[str, Any]:
        """A task's preset, without options that define this variant and options that it does not have."""
        names = {field.name for field in dataclasses.fields(cast(Any, cls))} - set(cls.defining)
        values = {**task.presets.get(cls.preset, {}), **task.presets.get(cls.own_preset, {})}
        return {name: value for name, value in values.items() if name in names}

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> Self:
        """Options from the values given on the command line, with the preset of the task.

        It is the task that is given, or else the one that the file of ``task_from`` names.

        A missing file is reported by the recipe, after the checks of the options.
        """
        from torchrl_lang._files import Fields
        from torchrl_lang.recipes.tasks import TASKS, find_task, task_class

        if cls.task_from and given.get("task") is not None:
            return cls.for_task(find_task(given["task"]), **given)
        path = given[cls.task_from[0]] / cls.task_from[1] if cls.task_from else None
        if path is None or not path.is_file():
            return cls(**given)
        notes = Fields.read(path, remedy=f"restore the file, or make {path.parent} again").object("notes")
        name = notes.take("task", str, "")  # dialogues record none
        return cls.for_task(task_class(name), **given) if name in TASKS else cls(**given)


def option(default: Any, text: str, **ends: float) -> Any:
    """A dataclass field with a default, a help text and the bounds of its :class:`Range`."""
    return dataclasses.field(default=default, metadata={"help": text, "range": Range(**ends)})


def pairs(text: str) -> Any:
    """A dataclass field for a dict, empty by default; the command line gives its items as ``name=value``."""
    return dataclasses.field(default_factory=dict, metadata={"help": text})


def required(text: str) -> Any:
    """A dataclass field without a default."""
    return dataclasses.field(metadata={"help": text})


@dataclass_transform(frozen_default=True, kw_only_default=True)
def with_defaults(**defaults: Any) -> Callable[[type[T]], type[T]]:
    """Make a frozen dataclass of a class that changes defaults of inherited fields; their help and range stay.

    Raises:
        TypeError: the base has no such field.

    Examples:
        >>> import dataclasses
        >>> from torchrl_lang.recipes.options import option, with_defaults
        >>> @dataclasses.dataclass(frozen=True)
        ... class Options:
        ...     steps: int = option(10, "training steps")
        >>> @with_defaults(steps=20)
        ... class Longer(Options):
        ...     every: int = option(5, "steps between evaluations")
        >>> Longer(), dataclasses.fields(Longer)[0].metadata["help"]
        (Longer(steps=20, every=5), 'training steps')
    """

    def decorate(cls: type[T]) -> type[T]:
        hints = get_type_hints(cls)
        fields: dict[str, dataclasses.Field] = {}
        for base in reversed(cls.__mro__):
            fields |= getattr(base, "__dataclass_fields__", {})
        unknown = sorted(defaults.keys() - fields.keys())
        if unknown:
            raise TypeError(f"{cls.__name__} changes defaults of {unknown}, its base has {list(fields)}.")
        cls.__annotations__ = inspect.get_annotations(cls) | {name: hints[name] for name in defaults}
        for name, default in defaults.items():
            setattr(cls, name, dataclasses.field(default=default, metadata=fields[name].metadata))
        return dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    return decorate


def add_options(
    parser: argparse.ArgumentParser, options: type, presets: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Give ``parser`` an option ``--name`` for every field of a dataclass, and ``--config`` for a file of them.

    A help text names the default.

    Only options that are given end up in the parsed arguments, so that a preset can replace the defaults of the others.

    Args:
        parser: where to add the options.
        options: the dataclass.
        presets: other defaults by name of the task, for the help text.

    Examples:
        >>> import argparse, dataclasses
        >>> from torchrl_lang.recipes.options import Options, add_options, option, options_from
        >>> @dataclasses.dataclass
        ... class Training(Options):
        ...     steps: int = option(10, "training steps")
        ...     seed: int = option(0, "random seed")
        >>> parser = argparse.ArgumentParser()
        >>> add_options(parser, Training)
        >>> options_from(Training, parser.parse_args(["--steps", "3"]))
        Training(steps=3, seed=0)
    """
    hints, required = get_type_hints(options), []
    for field in dataclasses.fields(options):
        text = field.metadata.get("help", "")
        settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, **word_reader(hints[field.name])}
        default = field.default if field.default_factory is dataclasses.MISSING else ()
        if default is dataclasses.MISSING:
            settings["required"] = True
        else:
            notes = [f"default: {shown(default)}"]
            allowed = field.metadata.get("range", Range())
            notes += [] if allowed == Range() else [str(allowed)]
            for task, values in (presets or {}).items():
                notes += [f"{task}: {shown(values[field.name])}"] if field.name in values else []
            text += f" ({'; '.join(notes)})"
        if settings.get("nargs") == "*" and default:
            settings["nargs"] = "+"
        action = parser.add_argument("--" + field.name.replace("_", "-"), help=text, **settings)
        required += [action] if action.required else []
    text = "YAML file with values of these options; those on the command line override it"
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=read_path,
        default=argparse.SUPPRESS,
        help=text,
        action=_ConfigAction,
        options=options,
        required_options=required,
    )


class _ConfigAction(argparse.Action):
    """Reads the file of ``--config``; its options are no longer required on the command line."""

    def __init__(self, *args: Any, options: type, required_options: list[argparse.Action], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.options, self.required_options = options, required_options

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        from torchrl_lang.recipes.config_file import read_config

        if hasattr(namespace, self.dest):
            parser.error("--config was given twice: give one file")
        content = read_config(values, self.options)
        setattr(namespace, self.dest, content)
        for action in self.required_options:
            action.required = action.required and action.dest not in content


def options_from(options: type[Any], arguments: argparse.Namespace) -> Any:
    """The options that parsed arguments describe: those on the command line, then those of the file of ``--config``.

    Raises:
        ValueError: the file names code that would be imported, which may come from another person.
    """
    hints = get_type_hints(options)
    names = [field.name for field in dataclasses.fields(options)]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    of_file, task = getattr(arguments, "config", {}), given.get("task")
    own_task = of_file.get("task") or ""
    if ":" in own_task and task is None:
        raise ValueError(
            f"The file of --config names the task {own_task}, whose code is imported only if the command line names "
            f"it: add --task {own_task}."
        )
    return options.from_given(of_file | {name: from_words(hints[name], value) for name, value in given.items()})


def write_options(path: Path, options: Any, **more: Any) -> None:
    """Record options, and whatever else defines a run, as JSON."""
    from torchrl_lang._files import write_file

    record = json.loads(json.dumps({"version": _VERSION, **dataclasses.asdict(options), **more}, default=str))
    write_file(path, json.dumps({**record, _CHECKSUM: _checksum(record)}, indent=2) + "\n")


def read_options(path: Path) -> Fields:
    """Read what :func:`write_options` wrote.

    Raises:
        FileNotFoundError: there is no run.
        FileError: the record is damaged or was edited, or a newer version of this library wrote it.
    """
    from torchrl_lang._files import Fields

    if not path.exists():
        raise FileNotFoundError(f"There is no run in {path.parent}: {path.name} is missing. Train one there first.")
    remedy = (
        f"give the folder of a run; if {path.parent} is one, put the file back as it was or train in another folder"
    )
    record = Fields.read(path, remedy=remedy)
    version = record.take("version", int, _VERSION)
    if version != _VERSION:
        raise record.error(f"is a record of version {version}, this version of the library reads {_VERSION}")
    values = {name: value for name, value in record.content.items() if name != _CHECKSUM}
    if _CHECKSUM in record.content and record.content[_CHECKSUM] != _checksum(values):
        raise record.error(f"is not as it was written: its {_CHECKSUM!r} is of other values")
    return record


def _checksum(record: Mapping[str, Any]) -> str:
    """A checksum of values in JSON, whatever their order and layout in a file."""
    return sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def check_record(path: Path, options: Any, *, free: tuple[str, ...] = (), **more: Any) -> None:
    """Raise unless a run is resumed with the options it was started with; ``free`` options may differ.

    Raises:
        ValueError: naming what differs.
    """
    from torchrl_lang._files import shorten

    before = read_options(path).content
    now = json.loads(json.dumps(dataclasses.asdict(options) | more, default=str))
    # An option that the run's version of the library did not have yet had the effect of its default.
    defaults = json.loads(json.dumps({field.name: field.default for field in dataclasses.fields(options)}, default=str))
    changed = [key for key, value in now.items() if before.get(key, defaults.get(key)) != value and key not in free]
    if changed:
        # The values of options are short, the checksums of a dataset are not.
        shown = [
            key if key in more else f"{key} was {shorten(before.get(key))} and is {shorten(now[key])}"
            for key in changed
        ]
        raise ValueError(
            f"{path.parent} holds a run with other options: {', '.join(shown)}. Give another --out, or delete it."
        )
