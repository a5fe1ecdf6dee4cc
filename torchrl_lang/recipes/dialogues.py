"""Make the dataset of a run from a JSONL file of dialogues."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_lang._files import folder_lock
from torchrl_lang.data import DialogueReader, RowDataset, dataset_from_jsonl, read_jsonl
from torchrl_lang.data.dataset import MANIFEST, load_dataset
from torchrl_lang.recipes.algorithms import OfflineOptions
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.load_run import load_model
from torchrl_lang.text import CharTokenizer, ChatTokenizer, Episode, HFTokenizer, RowFormat, Tokenizer
from torchrl_lang.text.rows import encode_episode
from torchrl_lang.training import Checkpointer

if TYPE_CHECKING:
    from torchrl_lang.recipes.tasks.base import Task

__all__ = ["dialogue_dataset"]


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
    check_place(options.out)
    with folder_lock(options.out, "trains"):
        if not (folder / MANIFEST).exists() or not Checkpointer(options.out / "checkpoints").steps():
            _write(options, task, folder)
    return load_dataset(folder)


def _write(options: OfflineOptions, task: Task | None, folder: Path) -> None:
    tokenizer = _given_tokenizer(options, task)
    length = options.row_length
    if tokenizer is None or length is None:
        episodes = _read(options, tokenizer)
        if tokenizer is None:
            tokenizer = CharTokenizer.from_texts(turn.text for episode in episodes for turn in episode.turns)
        if length is None:
            length = max(_longest(episodes, tokenizer), 0 if task is None else task.env(1).row_length)
    dataset_from_jsonl(
        options.data,
        folder,
        tokenizer,
        length,
        reader=_reader(options),
        on_error=options.on_error,
        on_overflow=options.on_overflow,
        overwrite=True,
    )


def _read(options: OfflineOptions, tokenizer: Tokenizer | None) -> Sequence[Episode]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the second reading warns of skipped lines
        return read_jsonl(options.data, tokenizer, reader=_reader(options), on_error=options.on_error)[0]


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
            raise ValueError(f"tokenizer={name!r} cannot be used: {error}") from error
    if chat:
        raise ValueError("chat and system need the tokenizer of a chat model: give --tokenizer NAME.")
    if task is not None:
        return task.tokenizer()
    if options.start is not None:
        return load_model(options.start)[1]
    if options.pretrained is not None:
        raise ValueError(
            f"pretrained={options.pretrained!r} needs its own tokenizer: give --tokenizer {options.pretrained}."
        )
    return None


def _longest(episodes: Sequence[Episode], tokenizer: Tokenizer) -> int:
    """Tokens of the longest dialogue; those that cannot be encoded are bad lines of the second reading."""
    longest = 1
    for episode in episodes:
        with suppress(ValueError):
            longest = max(longest, len(encode_episode(episode, tokenizer).tokens))
    return longest


def _reader(options: OfflineOptions) -> DialogueReader:
    """Reads the lines; the default key of rewards may be missing, another one must be there."""
    return DialogueReader(reward=None if options.reward == "reward" else options.reward, ignore=options.ignore)
