"""The folder that ``prepare visual_dialogue`` fills: dialogues, models, rewards and tokens, each read once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from torchrl_lang._files import FileError, read_manifest, write_manifest
from torchrl_lang.envs.visual_dialogue import (
    STOP,
    Dialogue,
    DialogueModels,
    ImageFeatures,
    LocalDialogueModels,
    Measure,
    SplitFiles,
    VisualDialogues,
)
from torchrl_lang.recipes.options import read_options
from torchrl_lang.text import Tokenizer, tokenizer_from_config

__all__ = [
    "FIGURES",
    "POOL",
    "RECORD",
    "DialogueTokens",
    "PreparedFolder",
    "local_models",
    "measured_tokens",
    "texts_of",
]

RECORD, TOKENS, FIGURES = "prepare.json", "tokens.json", "figures.json"
"""The options of ``prepare``; the tokenizer and its lengths; what was measured, which is written last."""

POOL = "val"
"""Split among whose images every true image is ranked, also those of other splits, as the ILQL paper's server does."""

_REMEDY = "run `prepare visual_dialogue` again"
_VERSION = 1


class DialogueTokens(NamedTuple):
    """A tokenizer, and the longest texts of the files in its tokens.

    Examples:
        >>> from torchrl_lang.text import word_tokenizer
        >>> from torchrl_lang.envs.visual_dialogue.folder import DialogueTokens
        >>> DialogueTokens(word_tokenizer([]), caption=2, question=4, answer=1).row_length
        75
    """

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
        fields = read_manifest(Path(self.folder) / TOKENS, remedy=_REMEDY, version=_VERSION)
        lengths = (fields.at_least(name, 1) for name in ("caption", "question", "answer"))
        return DialogueTokens(tokenizer_from_config(fields.take("tokenizer", dict)), *lengths)

    def write_tokens(self, tokens: DialogueTokens) -> None:
        """Write the tokenizer and the lengths, once for all."""
        content = {**tokens._asdict(), "tokenizer": tokens.tokenizer.config()}
        write_manifest(Path(self.folder) / TOKENS, {"version": _VERSION, **content})


def local_models(folder: Path, features: Path, split: str) -> DialogueModels:
    """Trained models in this process, which rank a true image among those of a split."""
    return LocalDialogueModels(folder, ImageFeatures(features, split).all())


def texts_of(dialogues: Sequence[Dialogue]) -> Iterable[str]:
    """All captions, questions and answers, and ``<stop>``.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, Round
        >>> from torchrl_lang.envs.visual_dialogue.folder import texts_of
        >>> [*texts_of([Dialogue("a dog", (Round("is it red?", "no"),))])]
        ['<stop>', 'a dog', 'is it red?', 'no']
    """
    yield STOP
    for dialogue in dialogues:
        yield from dialogue.texts


def measured_tokens(tokenizer: Tokenizer, files: Mapping[Path, Sequence[Dialogue]]) -> DialogueTokens:
    """The longest caption, question (or ``<stop>``) and answer of the dialogues of some files.

    Raises:
        FileError: the tokenizer cannot encode a text.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.text import word_tokenizer
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, Round
        >>> from torchrl_lang.envs.visual_dialogue.folder import measured_tokens, texts_of
        >>> dialogues = [Dialogue("a dog", (Round("is it red?", "no"),))]
        >>> tokens = measured_tokens(word_tokenizer(texts_of(dialogues)), {Path("visdial_0.5_val.json"): dialogues})
        >>> tokens.caption, tokens.action_length, tokens.answer, tokens.row_length
        (2, 5, 1, 75)
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
