"""Options of recipes in YAML files: read with an error for every mistake, and written so that a run can be repeated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from torchrl_lang._files import FileError, read_text, shorten, write_file
from torchrl_lang._files.errors import one_line
from torchrl_lang.recipes.option_types import describe_type, read_value
from torchrl_lang.recipes.ranges import Range, check_value

__all__ = ["read_config", "write_config"]

_REMEDY = "give a YAML file with one option per line, such as `steps: 100`"


class _Loader(yaml.SafeLoader):
    """Plain values only, and no key twice: PyYAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if isinstance(key, str) and keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                problem=f"the key {twice!r} is repeated", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


def read_config(path: Path, options: type) -> dict[str, Any]:
    r"""Read values of options from a YAML file.

    Keys are names of options, with ``-`` or ``_``. A number such as ``1e-3``, which is a text in YAML, is accepted, and
    ``none`` as on the command line.

    Args:
        path: the file.
        options: the dataclass that has the options.

    Raises:
        FileError: the file is missing or no YAML, a key is unknown or repeated, or a value is of another type or out
            of range.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torchrl_lang.recipes.bc import BC
        >>> from torchrl_lang.recipes.config_file import read_config
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = Path(home, "bc.yaml")
        ...     _ = path.write_text("lr: 1e-3\nlogger: [wandb]\nsteps: many")
        ...     read_config(path, BC)
        Traceback (most recent call last):
            ...
        torchrl_lang._files.errors.FileError: ...bc.yaml has 'many' as "steps": expected a whole number, at least 1.
    """
    try:
        content = _Loader(read_text(path, remedy=_REMEDY)).get_single_data()
    except FileError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileError(path, f"is not valid YAML ({one_line(error)})", _REMEDY) from error
    if content is None:  # an empty file
        return {}
    if not isinstance(content, dict):
        raise FileError(path, f"holds {shorten(content)}, not names of options with values", _REMEDY)
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints, values = get_type_hints(options), dict[str, Any]()
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in fields:
            raise FileError(path, f"has the unknown key {shorten(key)}", f"the options are {', '.join(fields)}")
        if name in values:
            raise FileError(path, f'has the option "{name}" twice', "give it once")
        values[name] = _read(path, fields[name], hints[name], value)
    return values


def _read(path: Path, field: dataclasses.Field, hint: Any, value: Any) -> Any:
    """The value of one option."""
    allowed = field.metadata.get("range", Range())
    try:
        found = read_value(hint, value)
    except TypeError as error:
        expected = describe_type(hint) + (f", {allowed}" if allowed != Range() else "")
        raise FileError(path, f'has {shorten(value)} as "{field.name}"', f"expected {expected}") from error
    try:
        check_value(field, found, hint)
    except ValueError as error:
        raise FileError(path, f'has {shorten(value)} as "{field.name}"', str(error).rstrip(".")) from error
    return found


def write_config(path: Path, options: Any) -> None:
    """Write the options of a run except its folder, for ``--config``."""
    plain = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    plain.pop("out")
    task = plain.get("task")
    own_task = f" --task {task}" if task is not None and ":" in task else ""
    header = f"# python -m torchrl_lang train {options.preset} --config {path.name} --out FOLDER{own_task}\n"
    write_file(path, header + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
