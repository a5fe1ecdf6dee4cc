"""The tasks that recipes train on: one line here for each, and those that users name as module:name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torchrl_lang.recipes.options import Options

if TYPE_CHECKING:  # these import torch, and `--help` must not wait for torch
    from torchrl_lang.recipes.tasks.base import Task

DIALOGUES = "dialogues"
"""Name in the record of a run that was trained on dialogues alone, in place of a task."""
OWN_TASK = "package.module:name"
"""How users name a task of their own, in help texts and errors."""

TASKS: dict[str, str | type[Task]] = {
    "wordle": "Wordle",
    "textworld": "TextWorld",
    "random_walks": "RandomWalks",
    "visual_dialogue": "VisualDialogue",
    "reddit": "Reddit",
    "games": "Games",
    "maze": "Maze",
    "questions": "Questions",
}
"""Name of each task -> its class; of this package's tasks the word ``X`` that the names of its classes begin with:
``XTask`` in ``torchrl_lang/envs/<name>/task.py``, ``XData`` and ``XPlay`` beside ``PRESETS`` in
``torchrl_lang/recipes/tasks/<name>.py``."""


def task_class(name: str) -> type[Task]:
    """The class of a registered task.

    Examples:
        >>> from torchrl_lang.recipes.tasks import task_class
        >>> task_class("wordle").__name__
        'WordleTask'
    """
    kind = TASKS[name]
    if not isinstance(kind, str):
        return kind
    return getattr(importlib.import_module(f"torchrl_lang.envs.{name}.task"), f"{kind}Task")


class GamesOptions(Options, group="data"):
    """Options that define the games of a task: they have the names of its fields."""

    of_task: ClassVar[str]

    def task(self) -> Any:
        """The task."""
        kind: Any = task_class(self.of_task)
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})


def options_of(name: str, command: Literal["generate", "play"]) -> type[Options]:
    """The options of a command for a task, registered or a user's own; torch is not imported for those of this package.

    Examples:
        >>> from torchrl_lang.recipes.tasks import options_of
        >>> options_of("wordle", "play").__name__
        'WordlePlay'
    """
    kind = TASKS.get(name)
    if isinstance(kind, str):
        ending = "Data" if command == "generate" else "Play"
        return getattr(importlib.import_module(f"{__name__}.{name}"), f"{kind}{ending}")
    task = find_task(name)
    return task.data_options if command == "generate" else task.play_options


def presets_of(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The presets of a registered task, without torch for those of this package."""
    kind = TASKS[name]
    return importlib.import_module(f"{__name__}.{name}").PRESETS if isinstance(kind, str) else kind.presets


def register(task: type[Task]) -> type[Task]:
    """Make a task of your own known to the recipes by its ``name``; usable as a class decorator.

    Datasets and runs of the task can then be opened. The recipe functions also take tasks that are not registered.

    Raises:
        ValueError: another task has that name.
    """
    if task.name == DIALOGUES or TASKS.setdefault(task.name, task) is not task:
        raise ValueError(f"There is a task {task.name!r} already: give {task.__name__} another name.")
    return task


def find_task(name: str, options: Mapping[str, Any] | None = None) -> type[Task]:
    """The class of a registered task, or of a user's own: a :class:`Task` or an environment factory in a module.

    A module that is named is imported, so the name must come from the user, never from a file.

    Args:
        name: of a registered task, or ``package.module:name``.
        options: of an environment factory.

    Raises:
        ValueError: there is no such task, or it takes no options.

    Examples:
        >>> from torchrl_lang.recipes.tasks import find_task
        >>> find_task("torchrl_lang.envs.games:CorridorEnv", {"length": 3}).without_notes().action_length
        2
    """
    if ":" in name:
        from torchrl_lang.recipes.tasks.env_task import import_task

        task = import_task(name, options or {})
        if task.name == DIALOGUES or TASKS.get(task.name, task) is not task:
            raise ValueError(f"There is a task {task.name!r} already: give {name} another 'name'.")
        return task
    if name not in TASKS or options:
        taking = f" that takes --option {dict(options)}" if options else ""
        raise ValueError(f"There is no task {name!r}{taking}: give {', '.join(TASKS)}, or your own as {OWN_TASK}.")
    return task_class(name)


def task_from_notes(notes: Mapping[str, Any], path: Path, given: type[Task] | None = None) -> Task:
    """The task that a dataset's manifest or a run's record describes.

    The name in the file is only looked up in :data:`TASKS` and compared with that of ``given``. It is never imported.

    Args:
        notes: of the manifest or record.
        path: of that file, for errors.
        given: the class that the user named.

    Raises:
        FileError: there is no such task, it is another one than ``given``, or a field is missing or wrong.
    """
    from torchrl_lang._files import FileError, file_errors, shorten

    name = notes.get("task")
    if given is not None and name != given.name:
        raise FileError(path, f"is about the task {shorten(name)}, not {given.name!r}", "give its own task")
    if given is None and name not in tuple(TASKS):  # it may be of any type
        found = f"is about the task {shorten(name)}, the recipes have {', '.join(TASKS)}"
        raise FileError(path, found, f"if it is your own, give its code with --task {OWN_TASK}, or to load_run")
    with file_errors(path, "holds no task", "restore the file, or give what it names", ValueError):
        return (given or task_class(str(name))).from_notes(notes)
