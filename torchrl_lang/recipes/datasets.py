"""Generate a task's dataset with its scripted players, and open one again together with its task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchrl_lang._files import Fields, FileError
from torchrl_lang.data import EpisodeSampler, RowDataset, generate_dataset, generate_in_parts, load_dataset
from torchrl_lang.data.dataset import MANIFEST, ROWS
from torchrl_lang.recipes.tasks import task_from_notes
from torchrl_lang.recipes.tasks.base import DataOptions, Task
from torchrl_lang.text import Tokenizer

__all__ = ["check_features", "check_place", "check_tokenizer", "generate_once", "main", "open_dataset", "open_task"]


def main(options: DataOptions) -> Path:
    """Generate the dataset; returns its folder."""
    check_place(options.out, new=True)
    task = options.task()
    maker = task.maker(options)
    dataset = _played(options, task) if maker is None else _made(options, task, maker)
    figures = dataset.manifest
    print(f"{len(dataset)} games, mean return {figures['mean_return']:.2f}, {figures['tokens']} tokens: {options.out}")
    return options.out


def _made(options: DataOptions, task: Task, maker: EpisodeSampler) -> RowDataset:
    """The games of a maker, in parts, so that the same command continues an interrupted one."""
    return generate_in_parts(
        maker,
        options.out,
        games=task.number_of_episodes(options),
        seed=options.seed,
        games_per_part=options.batch,
        source=f"{type(maker).__name__} in {task.name}",
        notes=_notes(options, task, maker),
        overwrite=options.overwrite,
    )


def _played(options: DataOptions, task: Task) -> RowDataset:
    """Games of one player."""
    player = task.behavior_policy(options)
    env = task.env(min(options.batch, task.number_of_episodes(options)), **player.env_options)
    try:
        return generate_dataset(
            env,
            player.policy,
            options.out,
            episodes=task.number_of_episodes(options),
            seed=options.seed,
            source=f"{type(player.policy).__name__} in {task.name}",
            notes=_notes(options, task, None),
            overwrite=options.overwrite,
        )
    finally:
        env.close()


def _notes(options: DataOptions, task: Task, maker: EpisodeSampler | None) -> dict[str, Any]:
    """What the dataset records; with a maker also the number of games, as it may make several rows of one."""
    notes = task.notes() | options.notes()
    return notes if maker is None else {**maker.notes(), **notes, "games": task.number_of_episodes(options)}


def generate_once(options: DataOptions) -> Path:
    """Generate the dataset, or use the one that an earlier call with the same options generated.

    Raises:
        ValueError: the folder holds a dataset of other options.
    """
    if not (options.out / MANIFEST).exists():
        return main(options)
    dataset, task = load_dataset(options.out), options.task()
    maker = task.maker(options)
    same_number = maker is not None or len(dataset) == task.number_of_episodes(options)  # a maker's is in the notes
    notes = json.loads(json.dumps(_notes(options, task, maker)))
    if not same_number or dataset.manifest["notes"] != notes:
        raise ValueError(
            f"{options.out} holds a dataset of other options: delete {options.out.parent} or give another --out."
        )
    print(f"using the dataset in {options.out}")
    return options.out


def open_dataset(folder: Path) -> tuple[RowDataset, Task]:
    """A dataset and its registered task.

    Raises:
        ValueError: there is no such task, or the dataset has another tokenizer than the task.
    """
    dataset = load_dataset(folder)
    task = open_task(dataset)
    if task is None:
        raise ValueError(f"{folder} records no task: it was not made by `generate`.")
    check_tokenizer(task, dataset.tokenizer, folder)
    return dataset, task


def open_task(dataset: RowDataset, given: type[Task] | None = None) -> Task | None:
    """The task that a dataset records; of one that records none that of the class ``given``, if any.

    Raises:
        FileError: there is no such task, or the record is damaged.
    """
    remedy = "generate the dataset again with `generate`"
    notes = Fields(dataset.manifest, dataset.folder / MANIFEST, remedy).object("notes")
    if "task" in notes.content:
        return task_from_notes(notes, given)
    return None if given is None else given.without_notes()


def check_tokenizer(task: Task, tokenizer: Tokenizer, folder: Path) -> None:
    """Raise ValueError unless the dataset or model in ``folder`` has the task's current tokenizer."""
    if task.tokenizer().config() != tokenizer.config():
        raise ValueError(
            f"{folder} was made with another tokenizer than the current one of the task {task.name!r}, by another "
            "version of this library or with other words: generate the dataset and train again."
        )


def check_features(task: Task, width: int, source: Path) -> None:
    """Raise ValueError unless the games show features of the width of those that ``source``, data or a run, has."""
    shown = task.features()
    if shown is None or shown[1] != width:
        found = "none" if shown is None else f"features of width {shown[1]}"
        raise ValueError(
            f"{source} has features of width {width}, but the games of the task {task.name!r} show {found}: give the "
            "environment that the features come from."
        )


def check_place(folder: Path, *, new: bool = False) -> None:
    """Raise FileError if output would be written into a file, or into a dataset.

    If the output is a ``new`` dataset, an existing dataset in ``folder`` itself is left to the writer's checks.
    """
    remedy = "give another folder as out"
    if folder.exists() and not folder.is_dir():
        raise FileError(folder, "is a file, not a folder", remedy)
    places = folder.absolute().parents if new else (folder.absolute(), *folder.absolute().parents)
    for place in places:
        if (place / MANIFEST).exists() and (place / ROWS).exists():
            raise FileError(folder, f"lies in the dataset {place}", remedy)
