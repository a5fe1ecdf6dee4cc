"""The tasks that recipes train on: one file and one line here for each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # these import torch, and `--help` must not wait for torch
    from torchrl_lang.recipes.tasks.base import Task
    from torchrl_lang.storage import Fields

__all__ = ["TASKS", "register", "task_class", "task_from_notes"]

TASKS: dict[str, str | type[Task]] = {
    "wordle": "WordleTask",
    "textworld": "TextWorldTask",
    "random_walks": "RandomWalksTask",
}
"""Name of each task -> its class; of this package's tasks the class in the module of that name."""


def task_class(name: str) -> type[Task]:
    """The class of a registered task.

    Examples:
        >>> from torchrl_lang.recipes.tasks import task_class
        >>> task_class("wordle").__name__
        'WordleTask'
    """
    kind = TASKS[name]
    return getattr(importlib.import_module(f"{__name__}.{name}"), kind) if isinstance(kind, str) else kind


def register(task: type[Task]) -> type[Task]:
    """Make a task of your own known to the recipes by its ``name``; usable as a class decorator.

    Datasets and runs of the task can then be opened. The recipe functions also take tasks that are not registered.

    Raises:
        ValueError: another task has that name.
    """
    if TASKS.setdefault(task.name, task) is not task:
        raise ValueError(f"There is a task {task.name!r} already: give {task.__name__} another name.")
    return task


def task_from_notes(notes: Fields) -> Task:
    """The task that a dataset's manifest or a run's record describes.

    The name in the file is only looked up in :data:`TASKS`. It is never imported.

    Raises:
        FileError: there is no such task, or a field is missing or wrong.
    """
    from torchrl_lang.storage import FileError, shorten

    name = notes.take("task", str)
    if name not in TASKS:
        raise notes.error(f"is about the task {shorten(name)}, the recipes have {', '.join(TASKS)}")
    try:
        return task_class(name).from_notes(notes)
    except FileError:
        raise
    except ValueError as error:
        raise notes.error(f"holds no task ({str(error).rstrip('.')})") from error
