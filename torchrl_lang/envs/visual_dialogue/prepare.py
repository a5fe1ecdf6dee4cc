"""Prepare visual dialogue: dialogues and image features, trained models, rewards of every round, a tokenizer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from tqdm import tqdm

from torchrl_lang._files import FileError, Record, folder_lock, remove_leftovers
from torchrl_lang.envs.visual_dialogue import (
    Dialogue,
    DialogueModels,
    DialogueRewards,
    DialogueTraining,
    LocalDialogueModels,
    SplitFiles,
    VisualDialogues,
    generate_visual_dialogues,
    save_dialogue_models,
    train_dialogue_models,
)
from torchrl_lang.envs.visual_dialogue.data import whole_scene
from torchrl_lang.envs.visual_dialogue.features import ImageFeatures
from torchrl_lang.envs.visual_dialogue.files import ROUNDS, read_reward_cache
from torchrl_lang.envs.visual_dialogue.rewards import STOP
from torchrl_lang.envs.visual_dialogue.scoring import Measure, unfinished_rewards, write_reward_caches
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.options import check_record, read_options, write_options
from torchrl_lang.recipes.tasks.visual_dialogue import PrepareVisualDialogue
from torchrl_lang.text import HFTokenizer, Tokenizer, word_tokenizer
from torchrl_lang.text.tokenizer_files import tokenizer_from_config

__all__ = ["POOL", "PrepareVisualDialogue", "PreparedFolder", "local_models", "main"]

RECORD, TOKENS, FIGURES = "prepare.json", "tokens.json", "figures.json"
"""The options of ``prepare``; the tokenizer and its lengths; what was measured, which is written last."""

POOL = "val"
"""Split among whose images every true image is ranked, also those of other splits, as the ILQL paper's server does."""

_SPLITS = ("train", "val", "test")
_BATCH = 64
"""Dialogues that the models score at a time."""
_Length = Annotated[int, Field(ge=1)]


class _Tokens(Record):
    tokenizer: dict[str, Any]
    caption: _Length
    question: _Length
    answer: _Length


class _Figures(Record):
    dialogues: dict[str, int]
    action_length: int
    row_length: int
    percentile_by_round: tuple[float, ...]
    rounds_to_cutoff: float
    answer_accuracy: float

    def __str__(self) -> str:
        return "\n".join(
            [
                f"dialogues: {', '.join(f'{many} {split}' for split, many in self.dialogues.items())}",
                f"tokens: actions of at most {self.action_length}, rows of at most {self.row_length}",
                f"held-out percentile by round: {' '.join(f'{value:.3f}' for value in self.percentile_by_round)}",
                f"held-out rounds until the cutoff: {self.rounds_to_cutoff:.1f}",
                f"held-out accuracy of the answerer: {self.answer_accuracy:.3f}",
            ]
        )


class DialogueTokens(NamedTuple):
    """A tokenizer, and the longest texts of the files in its tokens."""

    tokenizer: Tokenizer
    caption: int
    question: int
    answer: int

    @property
    def action_length(self) -> int:
        """Tokens of a question and its end."""
        return self.question + 1

    @property
    def row_length(self) -> int:
        """Tokens of a row with the longest caption, ten of the longest questions and answers, and all control tokens.

        ``2 + caption + 10 (question + 1 + answer + 1) + 1``
        """
        return 3 + self.caption + 10 * (self.action_length + self.answer + 1)


@dataclass(frozen=True)
class PreparedFolder:
    """The content of such a folder. What it returns is read once in a process and shared: folders are not changed.

    Args:
        folder: the path, as text.

    Raises:
        FileNotFoundError: on reading, it is not such a folder, or ``prepare`` has not finished.
        FileError: on reading, a file is damaged.
    """

    folder: str

    @property
    def models_folder(self) -> Path:
        """Folder of the trained answerer and guesser."""
        return Path(self.folder) / "models"

    def files(self, split: str) -> SplitFiles:
        """The files of a split: dialogues and features here or where ``--files`` named them, rewards always here."""
        given = read_options(Path(self.folder) / RECORD).take("files", str, "")
        source = Path(given or Path(self.folder) / "data")
        found = SplitFiles.in_folder(source, split, npy=not (source / "data_img.h5").exists())
        rewards = SplitFiles.in_folder(self.folder, split)
        return found._replace(rank_rewards=rewards.rank_rewards, distance_rewards=rewards.distance_rewards)

    def check(self) -> None:
        """Raise FileNotFoundError unless ``prepare`` has finished."""
        if not (Path(self.folder) / FIGURES).exists():
            raise FileNotFoundError(
                f"There is no finished visual dialogue in {self.folder}: prepare it with "
                f"`prepare visual_dialogue --out {self.folder}`."
            )

    @lru_cache(maxsize=8)  # noqa: B019  # equal paths have the same content
    def data(self, split: str, measure: Measure = "rank") -> VisualDialogues:
        """Dialogues, features and rewards of a split."""
        self.check()
        files = self.files(split)
        rewards = files.rank_rewards if measure == "rank" else files.distance_rewards
        return VisualDialogues(files.dialogues, files.features, split, rewards=rewards)

    @lru_cache(maxsize=2)  # noqa: B019
    def models(self) -> DialogueModels:
        """The trained models, which rank a true image among those of the split :data:`POOL`."""
        return local_models(self.models_folder, self.files(POOL).features, POOL)

    @lru_cache(maxsize=8)  # noqa: B019
    def tokens(self) -> DialogueTokens:
        """The tokenizer and the lengths."""
        self.check()
        found = _Tokens.read(Path(self.folder) / TOKENS, remedy="run `prepare visual_dialogue` again")
        return DialogueTokens(tokenizer_from_config(found.tokenizer), found.caption, found.question, found.answer)


def local_models(folder: Path, features: Path, split: str) -> DialogueModels:
    """Trained models in this process, which rank a true image among those of a split."""
    return LocalDialogueModels(folder, ImageFeatures(features, split).all())


def texts_of(dialogues: Sequence[Dialogue]) -> Iterable[str]:
    """All captions, questions and answers, and ``<stop>``."""
    yield STOP
    for dialogue in dialogues:
        yield from dialogue.texts


def measured_tokens(tokenizer: Tokenizer, files: Mapping[Path, Sequence[Dialogue]]) -> DialogueTokens:
    """The longest caption, question (or ``<stop>``) and answer of the dialogues of some files.

    Raises:
        FileError: the tokenizer cannot encode a text.
    """

    @cache
    def length(text: str) -> int:
        return len(tokenizer.encode(text))

    longest = {"caption": 0, "question": length(STOP), "answer": 0}
    for path, dialogues in files.items():
        for number, dialogue in enumerate(dialogues):
            texts = {"caption": dialogue.caption}
            for place, each in enumerate(dialogue.rounds):
                texts |= {f"dialog.{place}.{name}": text for name, text in each._asdict().items()}
            for name, text in texts.items():
                kind = name.rpartition(".")[-1]
                try:
                    longest[kind] = max(longest[kind], length(text))
                except ValueError as error:
                    problem = f'has a text as "item {number}.{name}" that cannot be encoded ({error})'
                    raise FileError(path, problem, "give a tokenizer that can, as `--tokenizer NAME`") from error
    return DialogueTokens(tokenizer, **longest)


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
        print(_Figures.read(options.out / FIGURES, remedy="delete it and run the same command again"))
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
        _Tokens(**{**tokens._asdict(), "tokenizer": tokens.tokenizer.config()}).write(options.out / TOKENS)
    if not prepared.models_folder.exists():
        with _timed(f"train guesser and answerer on {len(found['train'])} dialogues"):
            _train(options, prepared, found["train"])
    models = prepared.models()
    for split, data in found.items():
        _score(prepared, models, split, data)
    pool = found[POOL]
    pool.rewards = read_reward_cache(prepared.files(POOL).rank_rewards, len(pool))
    progress = torch.tensor(pool.rewards, dtype=torch.float64)  # [N, 11]
    ends = [len(whole_scene(pool.record(number), DialogueRewards()).progress) for number in range(len(pool))]
    _Figures(
        dialogues={split: len(data) for split, data in found.items()},
        action_length=tokens.action_length,
        row_length=tokens.row_length,
        percentile_by_round=tuple(progress.cumsum(-1).mean(0).tolist()),
        rounds_to_cutoff=sum(ends) / len(ends),
        answer_accuracy=_accuracy(models, pool),
    ).write(options.out / FIGURES)


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


@contextmanager
def _timed(what: str) -> Iterator[None]:
    print(what, flush=True)
    began = time.monotonic()
    yield
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
