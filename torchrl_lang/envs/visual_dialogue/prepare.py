"""The commands of visual dialogue: prepare dialogues, models, rewards and a tokenizer, compute rewards, serve."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from tqdm import tqdm

from torchrl_lang._files import Record, folder_lock, remove_leftovers
from torchrl_lang.envs.visual_dialogue.data import VisualDialogues, ended_scene
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, DialogueModels, Measure
from torchrl_lang.envs.visual_dialogue.files import ROUNDS, ImageFeatures, SplitFiles, read_reward_cache
from torchrl_lang.envs.visual_dialogue.generate import generate_visual_dialogues
from torchrl_lang.envs.visual_dialogue.models import LocalDialogueModels, train_dialogue_models
from torchrl_lang.envs.visual_dialogue.protocol import RemoteModels, RequestError
from torchrl_lang.envs.visual_dialogue.rewards import STOP, DialogueRewards
from torchrl_lang.envs.visual_dialogue.scoring import unfinished_rewards, write_reward_caches
from torchrl_lang.envs.visual_dialogue.server import DialogueServer, Questioner
from torchrl_lang.modules.save import FEATURES_HEAD
from torchrl_lang.recipes.datasets import check_place
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.records import check_record, read_options, write_options
from torchrl_lang.recipes.tasks.visual_dialogue import PrepareVisualDialogue, ServeVisualDialogue, VisualDialogueRewards
from torchrl_lang.text import HFTokenizer, Tokenizer, word_tokenizer
from torchrl_lang.text.tokenizer_files import tokenizer_from_config
from torchrl_lang.text.tokenizers import most_tokens

RECORD, TOKENS, FIGURES = "prepare.json", "tokens.json", "figures.json"
"""The options of ``prepare``; the tokenizer and its lengths; what was measured, which is written last."""

POOL = "val"
"""Split among whose images every true image is ranked, also those of other splits, as the ILQL paper's server does."""

_SPLITS = ("train", "val", "test")
_BATCH = 64
"""Dialogues that the models score at a time."""
_Length = Annotated[int, Field(ge=1)]


class DialogueTokens(Record):
    """A tokenizer, and the longest texts of the files in its tokens."""

    VERSION: ClassVar[int] = 2
    config: dict[str, Any]
    caption: _Length
    question: _Length
    answer: _Length

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return tokenizer_from_config(self.config)

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


class _Figures(Record):
    dialogues: dict[str, int]
    action_length: int
    row_length: int
    percentile_by_round: tuple[float, ...]
    rounds_to_cutoff: float
    answer_accuracy: float

    def __str__(self) -> str:
        return (
            f"dialogues: {', '.join(f'{many} {split}' for split, many in self.dialogues.items())}\n"
            f"tokens: actions of at most {self.action_length}, rows of at most {self.row_length}\n"
            f"held-out percentile by round: {' '.join(f'{value:.3f}' for value in self.percentile_by_round)}\n"
            f"held-out rounds until the cutoff: {self.rounds_to_cutoff:.1f}\n"
            f"held-out accuracy of the answerer: {self.answer_accuracy:.3f}"
        )


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
        given = read_options(Path(self.folder) / RECORD).model_dump()["files"]
        found = SplitFiles.in_folder(given or Path(self.folder) / "data", split)
        rewards = SplitFiles.in_folder(self.folder, split)
        return found._replace(rank_rewards=rewards.rank_rewards, distance_rewards=rewards.distance_rewards)

    @property
    def finished(self) -> Path:
        """The folder; FileNotFoundError unless ``prepare`` has finished."""
        if not (Path(self.folder) / FIGURES).exists():
            command = f"prepare visual_dialogue --out {self.folder}"
            raise FileNotFoundError(f"There is no finished visual dialogue in {self.folder}: `{command}` makes it.")
        return Path(self.folder)

    @lru_cache(maxsize=8)  # noqa: B019  # equal paths have the same content
    def data(self, split: str, measure: Measure = "rank") -> VisualDialogues:
        """Dialogues, features and rewards of a split."""
        _, files = self.finished, self.files(split)
        rewards = files.rank_rewards if measure == "rank" else files.distance_rewards
        return VisualDialogues(files.dialogues, files.features, split, rewards=rewards)

    @lru_cache(maxsize=2)  # noqa: B019
    def models(self) -> DialogueModels:
        """The trained models, which rank a true image among those of the split :data:`POOL`."""
        return local_models(self.models_folder, self.files(POOL).features, POOL)

    @lru_cache(maxsize=8)  # noqa: B019
    def tokens(self) -> DialogueTokens:
        """The tokenizer and the lengths."""
        return DialogueTokens.read(self.finished / TOKENS, remedy="run `prepare visual_dialogue` again")


def local_models(folder: Path, features: Path, split: str) -> DialogueModels:
    """Trained models in this process, which rank a true image among those of a split."""
    return LocalDialogueModels(folder, ImageFeatures(features, split).all())


def texts_of(dialogues: Sequence[Dialogue]) -> Iterable[str]:
    """All captions, questions and answers, and ``<stop>``."""
    return STOP, *(text for dialogue in dialogues for text in dialogue.texts)


def measured_tokens(tokenizer: Tokenizer, files: Mapping[Path, Sequence[Dialogue]]) -> DialogueTokens:
    """The longest caption, question (or ``<stop>``) and answer of the dialogues of some files.

    Raises:
        FileError: the tokenizer cannot encode a text.
    """
    longest = {"caption": 1, "question": len(tokenizer.encode(STOP)), "answer": 1}  # of empty texts too
    for path, dialogues in files.items():
        for kind in longest:
            longest[kind] = max(longest[kind], most_tokens(tokenizer, path, _placed_texts(dialogues, kind)))
    return DialogueTokens(config=tokenizer.config(), **longest)


def _placed_texts(dialogues: Sequence[Dialogue], kind: str) -> Iterator[tuple[str, str]]:
    """The captions, the questions or the answers of dialogues, each behind its place in their file."""
    for number, each in enumerate(dialogues):
        if kind == "caption":
            yield f"item {number}.caption", each.caption
        else:
            yield from ((f"item {number}.dialog.{n}.{kind}", getattr(one, kind)) for n, one in enumerate(each.rounds))


def main(options: PrepareVisualDialogue) -> Path:
    """Do what is not done yet; returns the folder."""
    check_place(options.out)
    if options.files is not None:
        options = replace(options, files=options.files.resolve())
    with folder_lock(options.out, "prepares"):
        remove_leftovers(options.out)
        record = options.out / RECORD
        if record.exists():
            check_record(record, options, free=("out",))
        elif any(options.out.iterdir()):
            raise FileExistsError(f"{options.out} is not empty and was not made by `prepare`: give another --out.")
        else:
            write_options(record, options)
        if not (options.out / FIGURES).exists():
            _prepare(options, PreparedFolder(str(options.out.resolve())))
        print(_Figures.read(options.out / FIGURES, remedy="delete it and run the same command again"))
    print(f"prepared visual dialogue in {options.out}", flush=True)
    return options.out


def _prepare(options: PrepareVisualDialogue, prepared: PreparedFolder) -> None:
    """Every part is written when it is complete, so a part that is there is not made again, but for the tokens."""
    generated = options.out / "data"
    if options.files is None and not generated.exists():
        splits = {split: getattr(options, split) for split in _SPLITS}
        with _timed(f"generate {splits} dialogues"):
            choices: dict[str, Any] = {name: getattr(options, name) for name in ("feature_size", "yes_no", "seed")}
            generate_visual_dialogues(generated, splits, npy=True, **choices)
    files = {split: prepared.files(split) for split in _SPLITS}
    found = {split: VisualDialogues(each.dialogues, each.features, split) for split, each in files.items()}
    if not prepared.models_folder.exists():  # what is wrong with them is found before models are trained
        for data in found.values():
            for _ in data.features.blocks():
                pass
    with _timed("measure the tokens of all dialogues"):
        every = {files[split].dialogues: data.dialogues for split, data in found.items()}
        tokens = measured_tokens(_tokenizer(options, found["train"]), every)
        tokens.write(options.out / TOKENS)
    if not prepared.models_folder.exists():
        with _timed(f"train guesser and answerer on {len(found['train'])} dialogues"):
            _train(options, found["train"], prepared.models_folder)
    models = prepared.models()
    for data in found.values():
        _score(prepared, models, data)
    pool = found[POOL]
    pool.rewards = read_reward_cache(files[POOL].rank_rewards, len(pool))
    progress = torch.tensor(pool.rewards, dtype=torch.float64)  # [N, 11]
    ends = [len(ended_scene(pool.scene(number), DialogueRewards()).progress) for number in range(len(pool))]
    _Figures(
        dialogues={split: len(data) for split, data in found.items()},
        action_length=tokens.action_length,
        row_length=tokens.row_length,
        percentile_by_round=tuple(progress.cumsum(-1).mean(0).tolist()),
        rounds_to_cutoff=sum(ends) / len(ends),
        answer_accuracy=_accuracy(models, pool),
    ).write(options.out / FIGURES)


def _tokenizer(options: PrepareVisualDialogue, train: VisualDialogues) -> Tokenizer:
    if options.tokenizer is not None:
        return HFTokenizer(options.tokenizer)
    # The texts of generated dialogues are known; people, and models trained on what they write, may write anything.
    return word_tokenizer(texts_of(train.dialogues), unknown=options.files is not None)


def _train(options: PrepareVisualDialogue, train: VisualDialogues, folder: Path) -> None:
    epochs = {"guesser": options.guesser_epochs, "answerer": options.answerer_epochs}

    def report(name: str, epoch: int, loss: float) -> None:
        print(f"{name}: epoch {epoch} of {epochs[name]}, loss {loss:.3f}", flush=True)

    more: Any = {f"{name}_epochs": many for name, many in epochs.items()}
    more |= {"width": options.width, "seed": options.seed}
    train_dialogue_models(train.dialogues, train.features, report=report, **more).save(folder)


def _score(prepared: PreparedFolder, models: DialogueModels, data: VisualDialogues) -> None:
    """Write both reward caches of a split."""
    split = data.features.split
    files, partial = prepared.files(split), unfinished_rewards(prepared.folder, split)
    if files.rank_rewards.exists() and files.distance_rewards.exists() and not partial.exists():
        return
    with tqdm(total=len(data), unit="dialogue", desc=f"rewards of {split}") as bar:
        options: Any = {"batch_size": _BATCH, "on_batch": lambda done: bar.update(done - bar.n)}
        write_reward_caches(models, data, prepared.folder, **options)


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


# -- further commands --------------------------------------------------------------------------------------------------


def compute_rewards(options: VisualDialogueRewards) -> None:
    """Compute the reward caches of a file of dialogues and save them."""
    data = VisualDialogues(options.dialogues, options.features, options.split)
    with folder_lock(options.out, "computes rewards"):
        near = None if options.models is None else local_models(options.models, options.features, options.split)
        more: Any = {"on_batch": lambda done: print(f"{done} of {len(data)} dialogues", flush=True)}
        models = RemoteModels(str(options.server)) if near is None else near
        write_reward_caches(models, data, options.out, batch_size=options.batch_size, **more)
    print(f"wrote the reward caches of {len(data)} dialogues to {options.out}")


def serve(options: ServeVisualDialogue) -> None:
    """Serve models over HTTP until SIGTERM or SIGINT."""
    models = local_models(options.models, options.features, options.split)
    questioner = None if options.questioner is None else run_questioner(options.questioner)
    more: Any = {name: getattr(options, name) for name in ("host", "port", "items", "queue")}
    server = DialogueServer(models, questioner, name=options.models.resolve().name, **more)
    server.run(lambda url: print(f"serving {options.models} on {url}, until Ctrl-C", flush=True))


def run_questioner(folder: Path) -> Questioner:
    """Asks as a finished run does, by greedy decoding."""
    run = load_run(folder)
    if FEATURES_HEAD in run.model.heads:
        found = f"The run in {folder} reads image features, which requests for questions do not have"
        raise ValueError(f"{found}: give one that was trained on data of `generate visual_dialogue --no-image`.")

    def ask(dialogues: Sequence[Dialogue]) -> list[str]:
        try:
            return run.replies([each.texts for each in dialogues])
        except ValueError as error:  # of a character that its tokenizer does not know, or a full row
            message = "is too long for the questioner, or has a character that it cannot read"
            raise RequestError(422, message, "history") from error

    return ask
