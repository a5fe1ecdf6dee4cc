"""Typed options: a dataclass is a recipe's configuration, its command line and its record on disk."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    ClassVar,
    Self,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

T = TypeVar("T")

GROUPS = ("data", "model", "optimisation", "loss", "evaluation", "run")
"""Groups of options in a help text, in this order; see :attr:`Options.group`."""
_LARGEST = 2**31 - 1
"""Upper bound of integers without another one; larger sizes, counts or seeds are typing errors."""
_ENDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
_REMEDY = "give a YAML file with one option per line, such as `steps: 100`"


class Options:
    """Base of the option dataclasses of all recipes. Values are checked on construction.

    Examples:
        >>> import dataclasses
        >>> from torchrl_lang.recipes.options import Options, option
        >>> @dataclasses.dataclass(frozen=True)
        ... class Training(Options):
        ...     steps: int = option(10, "training steps", ge=1)
        >>> Training(steps=0)
        Traceback (most recent call last):
            ...
        ValueError: --steps should be greater than or equal to 1, got 0.
    """

    group: ClassVar[str] = "run"
    """Group in the help text of the options that the class itself adds."""

    algorithm: ClassVar[str] = ""
    """Name of the algorithm in ``train``, and of its option values in :attr:`Task.presets`."""

    preset: ClassVar[str] = ""
    """Name of further option values in :attr:`Task.presets`, which count less than those of the algorithm."""

    defining: ClassVar[tuple[str, ...]] = ()
    """Options whose values make a variant of an algorithm what it is: presets of tasks do not change them."""

    task_from: ClassVar[tuple[str, str] | None] = None
    """An option with a folder, and the file there that names the task."""

    def __init_subclass__(cls, **settings: Any) -> None:
        """Class keywords set the attributes above: ``class Mine(Options, group="data")``."""
        super().__init_subclass__()
        for name, value in settings.items():
            setattr(cls, name, value)

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(cast(Any, self))]
        for name, value in validated(type(self), {name: getattr(self, name) for name in names}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def for_task(cls, task: Any, /, **given: Any) -> Self:
        """Options for a task: ``given`` values, then those for its model, the task's preset and the defaults."""
        return cls(**{**cls.preset_of(task.presets), **cls.preset_of_model(given), **given})

    @classmethod
    def preset_of(cls, presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Values of a task's presets, without options that define this variant and options that it does not have."""
        names = {field.name for field in dataclasses.fields(cast(Any, cls))} - set(cls.defining)
        values = {**presets.get(cls.preset, {}), **presets.get(cls.algorithm, {})}
        return {name: value for name, value in values.items() if name in names}

    @classmethod
    def preset_of_model(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values for the model that the ``given`` options name, which count more than those of a task; none here."""
        return {}

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> Self:
        """Options from the values that a user gave, with those of a preset."""
        return cls(**given)


def option(default: Any, text: str, *, group: str | None = None, **ends: float) -> Any:
    """A dataclass field with a default, a help text and a range: ``ge``, ``gt``, ``le``, ``lt``.

    ``group`` is that of the help text; default the one of the class.
    """
    return dataclasses.field(default=default, metadata={"help": text, "range": ends, "group": group})


def pairs(text: str) -> Any:
    """A dataclass field for a dict, empty by default; the command line gives its items as ``name=value``."""
    return dataclasses.field(default_factory=dict, metadata={"help": text})


def required(text: str) -> Any:
    """A dataclass field without a default."""
    return dataclasses.field(metadata={"help": text})


def range_in_words(field: dataclasses.Field) -> str:
    """The range of an option, such as "above 0, at most 1"."""
    return ", ".join(f"{_ENDS[name]} {end:.10g}" for name, end in field.metadata.get("range", {}).items())


@dataclass_transform(frozen_default=True, kw_only_default=True)
def with_defaults(**defaults: Any) -> Callable[[type[T]], type[T]]:
    """Make a frozen dataclass of a class that changes defaults of inherited fields; their help and range stay.

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
        cls.__annotations__ = inspect.get_annotations(cls) | {name: hints[name] for name in defaults}
        for name, default in defaults.items():
            setattr(cls, name, dataclasses.field(default=default, metadata=fields[name].metadata))
        return dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    return decorate


# -- options that all tasks share --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Base of the options of ``generate TASK``."""

    out: Path = required("folder of the dataset")
    games: int = option(10_000, "number of games", ge=1)
    batch: int = option(1024, "games played in parallel", ge=1)
    seed: int = option(0, "seed of games and players", ge=0)
    overwrite: bool = option(False, "replace an existing dataset")

    def task(self) -> Any:
        """The :class:`Task` that the options describe."""
        raise NotImplementedError

    def notes(self) -> dict[str, Any]:
        """Notes for the manifest beside the task, as JSON."""
        return {"batch": self.batch, "seed": self.seed}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlayOptions(Options):
    """Base of the options of ``play TASK``."""

    watch: str | None = option(None, "watch instead of playing: the folder of a finished run, or a scripted player")
    beta: float = option(4.0, "weight of the learned values in a watched run", ge=0)
    games: int = option(3, "games to watch", ge=1)
    seed: int | None = option(None, "seed of the games; none: a new one each time", ge=0)

    def task(self) -> Any:
        """The :class:`Task` that the options describe; a watched run has its own."""
        raise NotImplementedError


# -- values and their types -----------------------------------------------------------------------------------------


def validated(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of some options of a class in their types, from words of a command line, from YAML or from Python.

    Raises:
        ValueError: there is no such option, or a value is of another type or out of range.

    Examples:
        >>> import dataclasses
        >>> from torchrl_lang.recipes.options import Options, option, validated
        >>> @dataclasses.dataclass(frozen=True)
        ... class Training(Options):
        ...     lr: float = option(1e-3, "learning rate", gt=0)
        ...     layers: int | None = option(None, "blocks to train")
        >>> validated(Training, {"lr": "1e-2", "layers": "none"})
        {'lr': 0.01, 'layers': None}
    """
    names = [field.name for field in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            raise ValueError(unknown_option(str(name), names))
    try:
        return _adapter(kind).validate_python(dict(values))
    except ValidationError as error:
        raise ValueError(_in_one_line(error)) from None


def unknown_option(name: str, names: Iterable[str]) -> str:
    """The error about an option that does not exist, with the one that is most like it."""
    written = name.lstrip("-").partition("=")[0].replace("_", "-")
    known = [each.replace("_", "-") for each in names]
    if written == "beta" and "reward-scale" in known:  # the papers' name
        return "There is no option --beta; did you mean --reward-scale?"
    return f"There is no option --{written}" + near(written, known, "--")


def near(name: str, names: Iterable[str], prefix: str = "") -> str:
    """The end of a sentence about a wrong name: the one that is most like it, if there is one."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {prefix}{found[0]}?" if found else "."


@cache
def _adapter(kind: type) -> TypeAdapter[dict[str, Any]]:
    """Checks values of the fields of a dataclass, of which some may be missing."""
    hints = get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        checked = _with_range(hints[field.name], field.metadata.get("range", {}))
        if get_origin(hints[field.name]) is tuple and field.default:
            checked = Annotated[checked, Field(min_length=1)]
        found[field.name] = checked
    config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return TypeAdapter(with_config(config)(TypedDict(kind.__name__, found, total=False)))  # type: ignore[operator]


def _with_range(hint: Any, ends: Mapping[str, float]) -> Any:
    """A type whose numbers lie in a range."""
    parts = get_args(hint)
    if hint in (int, float):
        largest = {} if hint is float or {"le", "lt"} & ends.keys() else {"le": _LARGEST}
        limits: dict[str, Any] = {**largest, **ends}
        return Annotated[hint, BeforeValidator(_no_switch), Field(**limits)]
    if hint is Path:
        return Annotated[Path, BeforeValidator(_no_empty_path)]
    if get_origin(hint) in (Union, types.UnionType):
        union: Any = Union[tuple(_with_range(part, ends) for part in parts)]  # noqa: UP007  # of a tuple
        return Annotated[union, BeforeValidator(_none)] if type(None) in parts else union
    if get_origin(hint) is tuple:
        return tuple[_with_range(parts[0], ends), ...]  # type: ignore[misc]
    if get_origin(hint) is dict:
        return Annotated[dict[str, JsonValue], BeforeValidator(_named)]
    return hint


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _no_empty_path(value: Any) -> Any:
    if value == "":  # pathlib would take it for the current folder
        raise ValueError("should be a path")
    return value


def _none(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() == "none" else value


def _named(value: Any) -> Any:
    """A dict from words ``name=value``, whose values are JSON or else texts."""
    if not isinstance(value, (list, tuple)):
        return value
    found: dict[str, Any] = {}
    for word in value:
        name, equals, text = str(word).partition("=")
        if not equals or not name.isidentifier():
            raise ValueError("should be name=value")
        if name in found:
            raise ValueError(f"has {name} twice")
        try:
            found[name] = from_json(text, allow_inf_nan=False)
        except ValueError:
            found[name] = text
    return found


def _in_one_line(error: ValidationError) -> str:
    """The first option that is wrong, what it should be, and what it is."""
    found = error.errors(include_url=False)
    name = found[0]["loc"][0]
    if found[0]["type"] == "too_short":
        return f"--{dashed(name)} takes at least one value, got none."
    of_range = [each for each in found if each["type"].startswith(("greater", "less", "finite"))]
    texts = [each["msg"].partition(", unable to")[0] for each in of_range or found[:1]]
    texts = [text.removeprefix("Input ").removeprefix("Value error, ") for text in texts]
    choices = [each["msg"].removeprefix("Input should be ") for each in found if each["type"] == "literal_error"]
    text = " or ".join(dict.fromkeys([texts[0], *([] if of_range or texts[0].endswith(tuple(choices)) else choices)]))
    value = str(found[0]["input"])
    return f"--{dashed(name)} {text}, got {value if len(value) < 200 else value[:200] + '...'}."


def dashed(name: Any) -> str:
    """An option's name as the command line writes it."""
    return str(name).replace("_", "-")


def plain(options: Any, **more: Any) -> dict[str, Any]:
    """The values of options by name, and ``more``, as JSON has them: paths are texts, tuples lists."""
    return json.loads(json.dumps(dataclasses.asdict(options) | more, default=str))


# -- files ----------------------------------------------------------------------------------------------------------


def read_config(path: Path, kind: type) -> dict[str, Any]:
    r"""Read values of options from a YAML file; keys are written with ``-`` or ``_``.

    Raises:
        FileError: the file is missing or no YAML, a key is unknown or repeated, or a value is of another type or out
            of range.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.algorithms import BC
        >>> from torchrl_lang.recipes.options import read_config
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = Path(home, "bc.yaml")
        ...     _ = path.write_text("lr: 1e-3\nlogger: [wandb]\nsteps: 9")
        ...     read_config(path, BC)
        {'lr': 0.001, 'logger': ('wandb',), 'steps': 9}
    """
    import yaml

    from torchrl_lang._files import FileError, file_errors, read_text, shorten

    class Loader(yaml.SafeLoader):
        """Plain values only, and no key twice: PyYAML would take the last one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [str(key.value).replace("-", "_") for key, _ in node.value]
            if twice := [key for key in keys if keys.count(key) > 1]:
                problem = f"the key {twice[0]!r} is repeated"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    text = read_text(path, remedy=_REMEDY)
    with file_errors(path, "is not valid YAML", _REMEDY, yaml.YAMLError, ValueError, RecursionError):
        content = Loader(text).get_single_data()
    if content is None:  # an empty file
        return {}
    if not isinstance(content, dict):
        raise FileError(path, f"holds {shorten(content)}, not names of options with values", _REMEDY)
    names = [str(key).replace("-", "_") for key in content]
    with file_errors(path, "cannot be used", "see --help for the options", ValueError):
        return validated(kind, dict(zip(names, content.values(), strict=True)))


def write_config(path: Path, options: Any) -> None:
    """Write the options of a run except its folder, for ``--config``."""
    import yaml

    from torchrl_lang._files import write_file

    values = plain(options)
    del values["out"]
    task = values.get("task")
    own_task = f" --task {task}" if task is not None and ":" in task else ""
    header = f"# python -m torchrl_lang train {options.algorithm} --config {path.name} --out FOLDER{own_task}\n"
    write_file(path, header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
