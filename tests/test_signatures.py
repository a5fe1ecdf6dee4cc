"""What docs/stability.md calls stable is as recorded: signatures, and the options of commands with defaults and ranges.

``python -m tests.test_signatures`` records a change that is meant.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.weight import PACKAGE, module_name
from torchrl_lang.recipes.options import Options
from torchrl_lang.recipes.tasks import TASKS, task_class

RECORD = Path(__file__).with_name("signatures.txt")


def signatures() -> list[str]:
    """One line for each public function, class, method, option and preset."""
    public = [path for path in sorted(PACKAGE.rglob("__init__.py")) if not path.parent.name.startswith("_")]
    modules = [importlib.import_module(module_name(path)) for path in public]
    names = [(name, getattr(module, name)) for module in modules for name in getattr(module, "__all__", ())]
    tasks = [task_class(name) for name in TASKS]
    own = filter(_is_of_package, tasks)
    presets = (f"preset {task.name} {key} {given}" for task in own for key, given in task.presets.items())
    return sorted({line for name, value in names for line in _of(name, value)} | {*_options(), *presets})


def _of(name: str, value: Any) -> Iterator[str]:
    if callable(value) and hasattr(value, "__name__"):
        yield _line(name, value)
    if inspect.isclass(value):
        for key, method in vars(value).items():
            method = getattr(method, "__func__", method)
            if inspect.isfunction(method) and not key.startswith("_"):
                yield _line(f"{name}.{key}", method)


def _line(name: str, value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class without one of its own
        return name
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return name + re.sub(r" at 0x\w+", "", text)


def _options() -> Iterator[str]:
    for path in (PACKAGE / "recipes").rglob("*.py"):
        importlib.import_module(module_name(path))
    classes = [Options]
    for kind in classes:
        classes += kind.__subclasses__()
    for kind in set(classes):
        own = inspect.get_annotations(kind)
        if _is_of_package(kind) and dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                if field.name in own:
                    default = "required" if field.default is dataclasses.MISSING else repr(field.default)
                    limits = " ".join(f"{key} {limit}" for key, limit in field.metadata.get("range", {}).items())
                    yield f"{kind.__name__} --{field.name} {default} {limits}".rstrip()


def _is_of_package(kind: type[Any]) -> bool:
    """Whether a class is the package's own, not that of a test or of an example in a docstring."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__.startswith("torchrl_lang.") and getattr(module, kind.__name__, None) is kind


def test_nothing_stable_has_changed():
    assert signatures() == RECORD.read_text().splitlines()


if __name__ == "__main__":
    RECORD.write_text("\n".join(signatures()) + "\n")
