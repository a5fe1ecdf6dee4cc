"""Parse the options of a command, show its help, and describe errors that a user can correct in one line."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import os
import shutil
import textwrap
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import TypedDict

from torchrl_lang.recipes.options import GROUPS, Options, dashed, range_in_words, read_config, unknown_option, validated
from torchrl_lang.recipes.tasks import TASKS, find_task, presets_of, task_class

_WIDTH = 80
_PACKAGE = Path(__file__).parents[1]
_LONGEST = 2000
"""Maximum number of characters of an error; messages of other libraries can be long."""
_REMEDIES = {
    errno.ENOSPC: "make room on that disk and run the same command again",
    errno.EDQUOT: "make room within the quota of that disk and run the same command again",
    errno.EFBIG: "raise the limit on the size of files, or choose another disk",
    errno.EACCES: "give a folder or file that this user may use",
    errno.EPERM: "give a folder or file that this user may use",
    errno.EROFS: "give a folder on a disk that can be written",
    errno.ENOTDIR: "give a path that does not lead through a file",
    errno.EISDIR: "give a file instead of a folder",
    errno.EEXIST: "give another path, or move the old files away",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOENT: "check the path",
    errno.EMFILE: "raise the limit on open files, see `ulimit -n`",
}


class UsageError(ValueError):
    """The command line cannot be parsed."""


def parse(kind: type[Any], words: Sequence[str], prog: str) -> Any:
    """The options that the words of a command line describe, or ``None`` where ``--help`` was among them.

    Values of the command line count more than those of the file of ``--config``, and these more than the presets of the
    model, see :meth:`Options.preset_of_model`, and of the task, which is given or named by the file of
    :attr:`Options.task_from`.

    Raises:
        UsageError: an option is unknown, has no value or too many, or is missing.
        ValueError: a value is of another type or out of range, or the file names code that would be imported, which
            may come from another person.

    Examples:
        >>> import dataclasses
        >>> from torchrl_lang.recipes.command_line import parse
        >>> from torchrl_lang.recipes.options import Options, option
        >>> @dataclasses.dataclass
        ... class Training(Options):
        ...     steps: int = option(10, "training steps")
        ...     seed: int = option(0, "random seed")
        >>> parse(Training, ["--steps", "3"], "train")
        Training(steps=3, seed=0)
    """
    given = _given(kind, words, prog)
    if given is None:
        return None
    of_file = read_config(Path(path), kind) if (path := given.pop("config", None)) else {}
    given = validated(kind, given)
    own_task = of_file.get("task") or ""
    if ":" in own_task and given.get("task") is None:
        raise ValueError(f"--config never imports the code of a task that it names: add --task {own_task}.")
    given = of_file | given
    for field in dataclasses.fields(kind):
        if field.name not in given and _is_required(field):
            raise UsageError(f"--{dashed(field.name)} is missing ({field.metadata['help']}); see `{prog} --help`.")
    return kind.from_given(_preset(kind, given) | kind.preset_of_model(given) | given)


def _preset(kind: type[Options], given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset of the task. A missing file is reported by the recipe, after the checks of the options."""
    if kind.task_from is None:
        return {}
    if given.get("task") is not None:
        return kind.preset_of(find_task(given["task"]).presets)
    folder = given.get(kind.task_from[0])
    if folder is None or not (path := folder / kind.task_from[1]).is_file():
        return {}
    from torchrl_lang._files import read_json

    notes = read_json(path, remedy=f"restore the file, or make {path.parent} again").get("notes")
    name = notes.get("task") if isinstance(notes, dict) else None  # dialogues record none
    return kind.preset_of(task_class(name).presets) if name in tuple(TASKS) else {}


def _given(kind: type[Any], words: Sequence[str], prog: str) -> dict[str, Any] | None:
    """The words of each option that was given; ``None`` after the help."""
    import tyro

    hints, names = get_type_hints(kind), [field.name for field in dataclasses.fields(kind)]
    groups: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    asks = bool({"-h", "--help"} & {*words})
    written = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words}
    for field in sorted(dataclasses.fields(kind), key=lambda field: not _is_required(field)):
        if asks or {field.name, f"no_{field.name}"} & written:  # tyro takes a millisecond for each option
            group = field.metadata.get("group") or _group(kind, field.name)
            groups[group][field.name] = _argument(kind, field, hints[field.name])
    help_of_config = "YAML file with values of these options; those on the command line override it"
    config = tyro.conf.arg(help=help_of_config, metavar="FILE", help_behavior_hint="(default: none)")
    groups["run"]["config"] = Annotated[tuple[str, ...], config]
    types_of: dict[str, Any] = {
        name: TypedDict(name, fields, total=False)  # type: ignore[operator]
        for name, fields in groups.items()
        if fields
    }
    os.environ["COLUMNS"] = str(min(shutil.get_terminal_size().columns, _WIDTH))
    if asks:
        for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
            print(textwrap.fill(" ".join(paragraph.split()), _WIDTH), end="\n\n")  # tyro does not wrap it
    try:
        typed_dict: Any = TypedDict
        found, rest = tyro.cli(
            typed_dict("Options", types_of, total=False),
            prog=prog,
            description="",
            args=_gathered(words, [name for name, hint in hints.items() if get_origin(hint) is dict]),
            # Nothing of the help is in comments, and to look for them parses the source of this file.
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
            return_unknown_args=True,
        )
    except SystemExit:
        return None
    for word in rest:
        if word.startswith("-"):
            raise UsageError(f"{unknown_option(word, [*names, 'config'])} See `{prog} --help`.")
        raise UsageError(f"{word!r} belongs to no option; see `{prog} --help`.")
    values = {name: value for group in found.values() for name, value in group.items()}
    for name, value in values.items():
        hint = hints.get(name, str)
        if isinstance(value, tuple) and get_origin(hint) not in (tuple, dict):
            if len(value) != 1:
                raise UsageError(f"--{dashed(name)} takes one value, got {' '.join(value) or 'none'}.")
            values[name] = value[0]
    return values


def _gathered(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The words with the values of ``--option a=1 --option b=2`` behind one option, as tyro keeps the last one only."""
    rest, values, to = list[str](), {f"--{dashed(name)}": list[str]() for name in names}, None
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            to = values.get(name)
        if to is None:
            rest.append(word)
        elif not word.startswith("--"):
            to.append(word)
        elif equals:
            to.append(value)
    return rest + [word for name, found in values.items() if found for word in (name, *found)]


def _argument(kind: type[Any], field: dataclasses.Field, hint: Any) -> Any:
    """The words of an option, and its line in the help."""
    import tyro

    default = field.default
    if _is_required(field):
        note = "(required)"
    else:
        notes = [f"default: {_shown(() if default is dataclasses.MISSING else default)}"]
        notes += [text] if (text := range_in_words(field)) else []
        for task in TASKS if kind.preset or kind.algorithm else ():
            values = kind.preset_of(presets_of(task))
            notes += [f"{task}: {_shown(values[field.name])}"] if field.name in values else []
        values = kind.preset_of_model({"pretrained": "any"})
        notes += [f"pretrained: {_shown(values[field.name])}"] if field.name in values else []
        note = f"({'; '.join(notes)})"
    settings: dict[str, Any] = {"help": field.metadata.get("help", ""), "help_behavior_hint": note}
    if hint is bool:
        return Annotated[bool, tyro.conf.arg(**settings)]
    return Annotated[tuple[str, ...], tyro.conf.arg(metavar=_metavar(hint), **settings)]


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _metavar(hint: Any) -> str:
    """A type in a help text: ``INT``, ``FLOAT|none``, ``a|b``, ``STR ...``."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is tuple:
        return f"{_metavar(parts[0])} ..."
    if origin is dict:
        return "NAME=VALUE"
    if origin in (Union, types.UnionType):
        return "|".join(map(_metavar, parts))
    return "none" if hint is type(None) else hint.__name__.upper()


def _shown(value: Any) -> str:
    return (" ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value).replace("None", "none")


def _group(kind: Any, name: str) -> str:
    """The group of the class that adds an option; one that changes its default does not count."""
    return next(base.group for base in reversed(kind.__mro__) if name in getattr(base, "__dataclass_fields__", {}))


def describe(error: Exception, options: Any = None) -> str | None:
    """One line about an error that the user can correct, or ``None`` where it is a bug and its traceback is needed.

    Errors of the operating system (a full disk, a missing permission) and errors that this package raises itself can be
    corrected by the user. Errors that other libraries raise are bugs.

    Args:
        error: the error.
        options: of the command; their ``out`` or ``run`` is named if the error names no file.

    Examples:
        >>> from torchrl_lang.recipes.command_line import describe
        >>> describe(PermissionError(13, "Permission denied", "/runs"))
        '/runs: Permission denied; give a folder or file that this user may use.'
    """
    from torchrl_lang._files import one_line

    if isinstance(error, OSError) and error.errno is not None:
        place = error.filename or getattr(options, "out", None) or getattr(options, "run", None)
        remedy = _REMEDIES.get(error.errno)
        text = " ".join((error.strerror or str(error)).split())
        return (f"{place}: " if place else "") + text + (f"; {remedy}." if remedy else ".")
    # Torch may not have been imported yet, and on the CPU it has no class of its own for the error.
    of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if of_torch or isinstance(error, MemoryError):
        return f"out of memory ({one_line(error, 200)}): give smaller batches, fewer games or a smaller model."
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    is_ours = not frames or Path(frames[-1].f_code.co_filename).is_relative_to(_PACKAGE)
    of_users = isinstance(error, (ValueError, ImportError, ArithmeticError)) and is_ours
    return one_line(error, _LONGEST) if isinstance(error, OSError) or of_users else None
