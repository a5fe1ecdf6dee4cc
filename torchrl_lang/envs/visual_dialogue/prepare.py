"""Prepare visual dialogue: dialogues and image features, trained models, rewards of every round, a tokenizer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from torchrl_lang._files import folder_lock, read_json, remove_leftovers, write_json
from torchrl_lang.envs.visual_dialogue import (
    DialogueModels,
    DialogueRewards,
    DialogueTraining,
    VisualDialogues,
    generate_visual_dialogues,
    read_reward_cache,
    save_dialogue_models,
    train_dialogue_models,
    whole_scene,
    write_reward_caches,
)
from torchrl_lang.envs.visual_dialogue.files import ROUNDS
from torchrl_lang.envs.visual_dialogue.folder import (
    FIGURES,
    POOL,
    RECORD,
    PreparedFolder,
    measured_tokens,
    texts_of,
)
from torchrl_lang.envs.visual_dialogue.reward_cache import unfinished_rewards
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.options import check_record, write_options
from torchrl_lang.recipes.tasks.visual_dialogue import PrepareVisualDialogue
from torchrl_lang.text import HFTokenizer, Tokenizer, word_tokenizer

__all__ = ["PrepareVisualDialogue", "main"]

_SPLITS = ("train", "val", "test")
_BATCH = 64
"""Dialogues that the models score at a time."""


def main(options: PrepareVisualDialogue) -> Path:
    """Do what is not done yet; returns the folder."""
    check_place(options.out)
    if options.files is not None:
        options = replace(options, files=options.files.resolve())
    with folder_lock(options.out, "prepares"):
        remove_leftovers(options.out)
        _check_options(options)
        prepared = PreparedFolder(str(options.out.resolve()))
        if not (options.out / FIGURES).exists():
            _prepare(options, prepared)
        print(_report(read_json(options.out / FIGURES, remedy="delete it and run the same command again")))
    print(f"prepared visual dialogue in {options.out}", flush=True)
    return options.out


def _check_options(options: PrepareVisualDialogue) -> None:
    """Record the options, or check that they are those of the calls before.

    Raises:
        ValueError: they are others.
        FileExistsError: the folder holds something else.
    """
    record = options.out / RECORD
    if record.exists():
        check_record(record, options, free=("out",))
        return
    if any(options.out.iterdir()):
        raise FileExistsError(f"{options.out} is not empty and was not made by `prepare`: give another --out.")
    write_options(record, options)


def _prepare(options: PrepareVisualDialogue, prepared: PreparedFolder) -> None:
    """Every part is written when it is complete, so a part that is there is not made again, but for the tokens."""
    generated = options.out / "data"
    if options.files is None and not generated.exists():
        splits = {split: getattr(options, split) for split in _SPLITS}
        with _timed(f"generate {splits} dialogues"):
            choices: dict[str, Any] = {name: getattr(options, name) for name in ("feature_size", "yes_no", "seed")}
            generate_visual_dialogues(generated, splits, npy=True, **choices)
    found = {split: _read(prepared, split) for split in _SPLITS}
    if not prepared.models_folder.exists():  # what is wrong with them is found before models are trained
        for data in found.values():
            for _ in data.features.blocks():
                pass
    with _timed("measure the tokens of all dialogues"):
        every = {prepared.files(split).dialogues: data.dialogues for split, data in found.items()}
        tokens = measured_tokens(_tokenizer(options, found["train"]), every)
        prepared.write_tokens(tokens)
    if not prepared.models_folder.exists():
        with _timed(f"train guesser and answerer on {len(found['train'])} dialogues"):
            _train(options, prepared, found["train"])
    models = prepared.models()
    for split, data in found.items():
        _score(prepared, models, split, data)
    pool = found[POOL]
    pool.rewards = read_reward_cache(prepared.files(POOL).rank_rewards, len(pool))
    figures = _held_out(models, pool)
    dialogues = {split: len(data) for split, data in found.items()}
    lengths = {"action_length": tokens.action_length, "row_length": tokens.row_length}
    write_json(options.out / FIGURES, {"dialogues": dialogues, **lengths, **figures})


def _read(prepared: PreparedFolder, split: str) -> VisualDialogues:
    files = prepared.files(split)
    return VisualDialogues(files.dialogues, files.features, split)


def _tokenizer(options: PrepareVisualDialogue, train: VisualDialogues) -> Tokenizer:
    if options.tokenizer is not None:
        return HFTokenizer(options.tokenizer)
    # The texts of generated dialogues are known; people, and models trained on what they write, may write anything.
    return word_tokenizer(texts_of(train.dialogues), unknown=options.files is not None)


def _train(options: PrepareVisualDialogue, prepared: PreparedFolder, train: VisualDialogues) -> None:
    choices = {name: getattr(options, name) for name in ("guesser_epochs", "answerer_epochs", "width", "seed")}
    epochs = {"guesser": options.guesser_epochs, "answerer": options.answerer_epochs}

    def report(name: str, epoch: int, loss: float) -> None:
        print(f"{name}: epoch {epoch} of {epochs[name]}, loss {loss:.3f}", flush=True)

    trained = train_dialogue_models(train.dialogues, train.features, DialogueTraining(**choices), report=report)
    save_dialogue_models(trained, prepared.models_folder)


def _score(prepared: PreparedFolder, models: DialogueModels, split: str, data: VisualDialogues) -> None:
    """Write both reward caches of a split."""
    files, partial = prepared.files(split), unfinished_rewards(prepared.folder, split)
    if files.rank_rewards.exists() and files.distance_rewards.exists() and not partial.exists():
        return
    with tqdm(total=len(data), unit="dialogue", desc=f"rewards of {split}") as bar:
        write_reward_caches(
            models,
            data.dialogues,
            data.features.rows,
            prepared.folder,
            split,
            batch_size=_BATCH,
            on_batch=lambda done: bar.update(done - bar.n),
        )


def _held_out(models: DialogueModels, data: VisualDialogues) -> dict[str, Any]:
    """Mean percentile after the caption and after each round, rounds to the cutoff, and share of right answers."""
    assert data.rewards is not None
    progress = torch.tensor(data.rewards, dtype=torch.float64)  # [N, 11]
    ends = [len(whole_scene(data.record(number), DialogueRewards()).progress) for number in range(len(data))]
    return {
        "percentile_by_round": progress.cumsum(-1).mean(0).tolist(),
        "rounds_to_cutoff": sum(ends) / len(ends),
        "answer_accuracy": _accuracy(models, data),
    }


def _accuracy(models: DialogueModels, data: VisualDialogues) -> float:
    """Share of answers that equal those of the dialogues, given the rounds before."""
    right = 0
    for numbers in torch.arange(len(data)).split(_BATCH):
        features, dialogues = data.features.rows(numbers), [data.dialogues[number] for number in numbers.tolist()]
        for done in range(ROUNDS):
            before = [dialogue.first(done) for dialogue in dialogues]
            asked = [dialogue.rounds[done] for dialogue in dialogues]
            answers = models.answers(before, [each.question for each in asked], features)
            right += sum(given == each.answer for given, each in zip(answers, asked, strict=True))
    return right / (ROUNDS * len(data))


def _report(figures: Mapping[str, Any]) -> str:
    percentiles: Sequence[float] = figures["percentile_by_round"]
    return "\n".join(
        [
            f"dialogues: {', '.join(f'{many} {split}' for split, many in figures['dialogues'].items())}",
            f"tokens: actions of at most {figures['action_length']}, rows of at most {figures['row_length']}",
            f"held-out percentile by round: {' '.join(f'{value:.3f}' for value in percentiles)}",
            f"held-out rounds until the cutoff: {figures['rounds_to_cutoff']:.1f}",
            f"held-out accuracy of the answerer: {figures['answer_accuracy']:.3f}",
        ]
    )


@contextmanager
def _timed(what: str) -> Iterator[None]:
    print(what, flush=True)
    began = time.monotonic()
    yield
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
