"""Import a task that a user names on the command line as ``package.module:name``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torchrl.envs import EnvBase

from torchrl_lang._files import shorten
from torchrl_lang.recipes.tasks import DIALOGUES, OWN_TASK, TASKS, task_class
from torchrl_lang.recipes.tasks.base import DataOptions, PlayOptions, Task
from torchrl_lang.recipes.tasks.env_task import SIGNATURE, describe_failure, env_task

__all__ = ["import_task"]

_EXPECTED = f"expected a subclass of Task, or {SIGNATURE}"


def import_task(name: str, options: Mapping[str, Any]) -> type[Task]:
    """Import a :class:`Task` class, or make one of an environment factory.

    Args:
        name: ``package.module:name``, as the user gave it; the module is imported.
        options: of an environment factory.

    Raises:
        ValueError: the module cannot be imported, or has no such task or factory; the message has the reason.
    """
    found = _attribute(name)
    if isinstance(found, type) and issubclass(found, Task):
        if options:
            raise ValueError(f"--option is for environment factories, but {name} is a Task: got {dict(options)}.")
        return _checked(name, found)
    if callable(found) and not isinstance(found, EnvBase):
        return env_task(name, found, options)
    raise ValueError(f"{name} is {shorten(found)}, of the type {type(found).__name__}: {_EXPECTED}.")


def _attribute(name: str) -> Any:
    place, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*place.split("."), attribute)):
        raise ValueError(f"{name!r} does not name a task: expected {OWN_TASK}.")
    try:
        module = importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"The module {place!r} of the task {name!r} cannot be imported ({describe_failure(error)}): it must be "
            "importable from the folder in which the command runs."
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"The module {place!r} ({module.__file__}) has no {attribute!r}: {_EXPECTED}.")
    return getattr(module, attribute)


def _checked(name: str, task: type[Task]) -> type[Task]:
    """The class, if it has all that recipes need."""
    expected: dict[str, tuple[str, type]] = {
        "data_options": ("a subclass of DataOptions", DataOptions),
        "play_options": ("a subclass of PlayOptions", PlayOptions),
    }
    missing = sorted(getattr(task, "__abstractmethods__", ()))
    if inspect.isabstract(task):
        raise ValueError(f"The task {name} lacks the methods {', '.join(missing)}: see the base class Task.")
    if not isinstance(getattr(task, "name", None), str):
        raise ValueError(f"The task {name} needs a class attribute 'name', a text: see the base class Task.")
    for attribute, (text, base) in expected.items():
        value = getattr(task, attribute, None)
        if not (isinstance(value, type) and issubclass(value, base)):
            raise ValueError(f"The task {name} has {shorten(value)} as {attribute!r}: expected {text}.")
    if task.name == DIALOGUES or (task.name in TASKS and task_class(task.name) is not task):
        raise ValueError(f"There is a task {task.name!r} already: give {name} another 'name'.")
    return task
