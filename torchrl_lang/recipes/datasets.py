"""Datasets: generate one with a task's players, write one of dialogues, and open one with its task."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from torchrl_lang import _ranks
from torchrl_lang._files import FileError, folder_lock, remove_leftovers
from torchrl_lang.data import DialogueReader, RowDataset, dataset_from_jsonl, load_dataset
from torchrl_lang.data.dataset import MANIFEST, ROWS
from torchrl_lang.data.generate import EpisodeSampler, generate_dataset, generate_in_parts
from torchrl_lang.data.jsonl import read_jsonl
from torchrl_lang.recipes.algorithms.offline import OfflineOptions
from torchrl_lang.recipes.load_run import load_model
from torchrl_lang.recipes.tasks import task_from_notes
from torchrl_lang.recipes.tasks.base import DataOptions, Task, check_tokenizer
from torchrl_lang.text import CharTokenizer, ChatTokenizer, Episode, HFTokenizer, RowFormat, Tokenizer
from torchrl_lang.text.rows import encode_episode, parts_of
from torchrl_lang.training import Checkpointer


def main(options: DataOptions) -> Path:
    """Generate the dataset; returns its folder."""
    check_place(options.out, new=True)
    task = options.task()
    maker, number = task.maker(options), task.number_of_episodes(options)
    shared: dict[str, Any] = {"seed": options.seed, "overwrite": options.overwrite}
    shared["notes"] = _notes(options, task, maker)
    if maker is not None:  # in parts, so that the same command continues an interrupted one
        shared["source"] = f"{type(maker).__name__} in {task.name}"
        dataset = generate_in_parts(maker, options.out, games=number, games_per_part=options.batch, **shared)
    else:
        player = task.behavior_policy(options)
        shared["source"] = f"{type(player.policy).__name__} in {task.name}"
        with closing(task.env(min(options.batch, number), **player.env_options)) as env:
            dataset = generate_dataset(env, player.policy, options.out, episodes=number, **shared)
    figures = dataset.manifest
    print(f"{len(dataset)} games, mean return {figures['mean_return']:.2f}, {figures['tokens']} tokens: {options.out}")
    return options.out


def _notes(options: DataOptions, task: Task, maker: EpisodeSampler | None) -> dict[str, Any]:
    """Notes of the dataset; with a sampler also the number of games, as it may make several rows of one.

    A task or its options may have ``games`` of their own.
    """
    notes = task.notes() | options.notes()
    return notes if maker is None else {"games": task.number_of_episodes(options), **maker.notes(), **notes}


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
        raise ValueError(f"{options.out} holds a dataset of other options: delete it, or give another --out.")
    print(f"using the dataset in {options.out}")
    return options.out


def open_dataset(folder: Path) -> tuple[RowDataset, Task]:
    """A dataset and its registered task.

    Raises:
        ValueError: there is no such task, or the dataset has another tokenizer than the task.
    """
    dataset = load_dataset(folder)
    task = task_from_notes(dataset.manifest["notes"], folder / MANIFEST)
    check_tokenizer(task, dataset.tokenizer, folder)
    return dataset, task


def open_task(dataset: RowDataset, given: type[Task] | None = None) -> Task | None:
    """The task that a dataset records; of one that records none that of the class ``given``, if any.

    Raises:
        FileError: there is no such task, or the record is damaged.
    """
    notes = dataset.manifest["notes"]
    if "task" in notes:
        return task_from_notes(notes, dataset.folder / MANIFEST, given)
    return None if given is None else given.without_notes()


def check_place(folder: Path, *, new: bool = False) -> None:
    """Raise FileError if output would be written into a dataset.

    If the output is a ``new`` dataset, an existing dataset in ``folder`` itself is left to the writer's checks.
    """
    places = folder.absolute().parents if new else (folder.absolute(), *folder.absolute().parents)
    for place in places:
        if (place / MANIFEST).exists() and (place / ROWS).exists():
            raise FileError(folder, f"lies in the dataset {place}", "give another folder as --out")


@contextmanager
def output_folder(folder: Path, purpose: str = "runs this demo") -> Iterator[None]:
    """Hold the folder of a command's results exclusively, without what a killed process left there.

    Args:
        folder: created if it does not exist; not in a dataset.
        purpose: what the command does there, see :func:`~torchrl_lang._files.folder_lock`.
    """
    check_place(folder)
    with folder_lock(folder, purpose):
        remove_leftovers(folder)
        yield


def dialogue_dataset(options: OfflineOptions, task: Task | None) -> RowDataset:
    """Write the dialogues as rows into the run's folder, or open what an earlier call wrote there.

    The dataset of a run that has a checkpoint is never written again. Whether the file still has the same content is
    compared when the run is resumed.

    Args:
        options: of the run; ``data`` is the file.
        task: whose tokenizer and row length are used where no others are given.

    Raises:
        FileError: the file is missing, or holds bad lines.
        ValueError: the options contradict each other, or no tokenizer fits.
    """
    folder = options.out / "data"
    if _ranks.is_first():
        with output_folder(options.out, "trains"):
            if not (folder / MANIFEST).exists() or not Checkpointer(options.out / "checkpoints").steps():
                _write_dialogues(options, task, folder)
    _ranks.wait()
    return load_dataset(folder)


def _write_dialogues(options: OfflineOptions, task: Task | None, folder: Path) -> None:
    tokenizer, length = _given_tokenizer(options, task), options.row_length
    # The default key of rewards may be missing, another one must be there.
    reward = None if options.reward == "reward" else options.reward
    reading: dict[str, Any] = {"reader": DialogueReader(reward=reward, ignore=options.ignore)}
    reading["on_error"] = options.on_error
    if tokenizer is None or length is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the second reading warns of skipped lines
            episodes = read_jsonl(options.data, tokenizer, **reading)[0]
        if tokenizer is None:
            tokenizer = CharTokenizer.from_texts(turn.text for episode in episodes for turn in episode.turns)
        if length is None:
            length = max(_longest(episodes, tokenizer), 0 if task is None else task.env(1).row_length)
    writing: Any = {"on_overflow": options.on_overflow, "overwrite": True}
    dataset_from_jsonl(options.data, folder, tokenizer, length, **reading, **writing)


def _given_tokenizer(options: OfflineOptions, task: Task | None) -> Tokenizer | None:
    """The tokenizer that the options name, that of the task or that of the run to start from."""
    name, chat = options.tokenizer, options.chat or options.system is not None
    if name is not None:
        try:
            if not chat:
                return HFTokenizer(name)
            row_format = RowFormat.from_chat_template(name, system=options.system, history=options.history)
            return ChatTokenizer(name, row_format)
        except TypeError as error:
            raise ValueError(f"--tokenizer {name} cannot be used: {error}") from error
    if chat:
        raise ValueError("--chat and --system need the tokenizer of a chat model: give --tokenizer NAME.")
    if task is not None:
        return task.tokenizer()
    own = None if options.start is None else load_model(options.start)[1]
    if own is None and (model := options.pretrained or options.start) is not None:
        name = "--pretrained" if options.start is None else "--start"
        raise ValueError(f"{name} {model} needs its own: give --tokenizer {model}.")
    return own


def _longest(episodes: Sequence[Episode], tokenizer: Tokenizer) -> int:
    """Tokens of the longest dialogue; those that cannot be encoded are bad lines of the second reading."""
    longest = 1
    for episode in episodes:
        with suppress(ValueError):
            parts = parts_of(episode, tokenizer)
            longest = max(longest, *(len(encode_episode(part, tokenizer).tokens) for part in parts))
    return longest
