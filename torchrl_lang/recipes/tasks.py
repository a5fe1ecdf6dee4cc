"""What the recipes know of a task, and how a data set or a run says which task it is about."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tensordict.nn import TensorDictModuleBase

from torchrl_lang.data import RowDataset, Tokenizer, load_dataset
from torchrl_lang.data.dataset_format import MANIFEST, ROWS
from torchrl_lang.envs import LanguageEnv
from torchrl_lang.evaluation import GameRecords, Summary
from torchrl_lang.storage import Fields, FileError
from torchrl_lang.storage.errors import shorten

__all__ = ["Task", "check_place", "check_words", "of_kind", "open_dataset", "task_from_notes"]

T = TypeVar("T", bound="Task")

_TASKS = {
    "wordle": ("torchrl_lang.recipes.wordle_task", "WordleTask"),
    "textworld": ("torchrl_lang.recipes.textworld_task", "TextWorldTask"),
}


class Task(Protocol):
    """Games to play, and how players of them are judged. Can be pickled, and travels as JSON with what is about it."""

    @property
    def action_length(self) -> int:
        """Tokens of an utterance, its end included."""

    def tokenizer(self) -> Tokenizer:
        """Reads all that the games say."""

    def env(self, batch_size: int, **options: Any) -> LanguageEnv:
        """Games to learn from, ``batch_size`` at a time; options such as ``seed`` and ``device`` go to the class."""

    def example(self, seed: int | None) -> tuple[TensorDictModuleBase, dict[str, Any]]:
        """A player of random admissible utterances, and the options of :meth:`env` that it needs."""

    def judge(
        self, policy: Any, *, games: int, seed: int, name: str = "", batch: int = 256, device: Any = None
    ) -> tuple[Summary, GameRecords]:
        """Play a fixed set of games and sum up."""

    def notes(self) -> dict[str, Any]:
        """What makes the task, as JSON; ``task`` among it is the task's name."""


def task_from_notes(notes: Fields) -> Task:
    """The task from what :meth:`Task.notes` wrote into a manifest or a run's record.

    The name that stands there is compared with a fixed table: nothing is imported by a name that is read from a file.

    Raises:
        FileError: there is no such task, or a field is missing or of another type.
    """
    name = notes.take("task", str)
    if name not in _TASKS:
        raise notes.error(f"is about the task {shorten(name)}, the recipes have {', '.join(_TASKS)}")
    module, kind = _TASKS[name]
    return getattr(importlib.import_module(module), kind).from_notes(notes)


def of_kind(task: Task, kind: type[T], folder: Path) -> T:
    """The task of a run or a data set in ``folder``, which must be of a kind.

    Raises:
        ValueError: it is about another task.
    """
    if not isinstance(task, kind):
        raise ValueError(f"{folder} is about {task.notes()['task']!r}, which this command does not play.")
    return task


def open_dataset(folder: Path) -> tuple[RowDataset, Task]:
    """A data set of games and the task that it is about.

    Raises:
        ValueError: there is no such task, or its games are told in other tokens than the data.
    """
    dataset = load_dataset(folder)
    manifest = Fields(dataset.manifest, folder / MANIFEST, "make the data set again with `generate`")
    task = task_from_notes(manifest.object("notes"))
    check_words(task, dataset.tokenizer, folder)
    return dataset, task


def check_place(folder: Path, *, new: bool = False) -> None:
    """Raise where something is to be written into a folder that lies in a data set, or is one.

    Args:
        folder: where something is to be written.
        new: a data set is to be written; one that is there is its writer's to refuse or to replace.

    Raises:
        FileError: naming the folder.
    """
    remedy = "give another folder as out"
    if folder.exists() and not folder.is_dir():
        raise FileError(folder, "is a file, not a folder", remedy)
    places = folder.absolute().parents if new else (folder.absolute(), *folder.absolute().parents)
    for place in places:
        if (place / MANIFEST).exists() and (place / ROWS).exists():
            raise FileError(folder, f"lies in the data set {place}", remedy)


def check_words(task: Task, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise unless what lies in ``folder`` reads the tokens that the games of its task are told in now.

    Raises:
        ValueError: the two tokenizers differ, so that every word would be mistaken for another.
    """
    if task.tokenizer().config() != tokenizer.config():
        raise ValueError(
            f"{folder} was made with other tokens than its games are told in now, by another version of this library "
            "or with other words: make the data set and train on it anew."
        )
