"""Read the files of visual dialogues: dialogues, caches of rewards and additional scenes, all of them JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from torchrl_lang._files import FileError, mistake, read_text
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round

__all__ = ["ROUNDS", "SceneRecord", "SplitFiles", "read_additional_scenes", "read_dialogues", "read_reward_cache"]

ROUNDS = 10
"""Rounds of a dialogue in the files."""

_MAX_BYTES = 1 << 33
"""Dialogues with a hundred candidate answers a round have more than a gigabyte."""
_DIALOGUES = 'give a list of {"caption": ..., "image_id": ..., "dialog": [10 times {"question": ..., "answer": ...}]}'
_NUMBERED = (
    "give a file of train or val as VisDial 0.9 and 1.0 have them (the test split of 1.0 has no answers to its last "
    "questions): split test dialogues off from one of these"
)
_REWARDS = f"give a list with {1 + ROUNDS} numbers for each dialogue, or compute the cache again"
_SCENES = 'give a list of {"caption": ..., "image": row, "dialog": [...], "rewards": [1 + number of rounds numbers]}'


class SplitFiles(NamedTuple):
    """The files of a split of the dataset.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import SplitFiles
        >>> SplitFiles.in_folder("data", "val").rank_rewards.name
        'val_rank_reward_cache1.json'
    """

    dialogues: Path
    features: Path
    """HDF5 with ``images_<split>``, or ``images_<split>.npy``."""
    rank_rewards: Path
    """Initial percentile and its change in each round."""
    distance_rewards: Path
    """Initial distance and its decrease in each round."""

    @classmethod
    def in_folder(cls, folder: str | Path, split: str, *, npy: bool = False) -> SplitFiles:
        """The files of a split in one folder, by the names that the ILQL paper's code gives them.

        Where there is no ``visdial_0.5_<split>.json``, one of version 1.0 or 0.9 takes its place.
        """
        folder = Path(folder)
        names = [folder / f"visdial_{version}_{split}.json" for version in ("0.5", "1.0", "0.9")]
        return cls(
            next((name for name in names if name.exists()), names[0]),
            folder / (f"images_{split}.npy" if npy else "data_img.h5"),
            folder / f"{split}_rank_reward_cache1.json",
            folder / f"{split}_reward_cache2.json",
        )


class SceneRecord(NamedTuple):
    """A dialogue of any length with the rewards of its rounds."""

    dialogue: Dialogue
    image: int
    """Row of its image in the features."""
    rewards: tuple[float, ...]
    """``[1 + rounds]``: the initial value, then the change in each round."""


class _Part(BaseModel):
    """A part of a file; fields that are not read, such as candidate answers, may have any content."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Texts(_Part):
    question: str
    answer: str


class _Numbers(_Part):
    question: Annotated[int, Field(ge=0)]
    answer: Annotated[int, Field(ge=0)]


class _Item(_Part):
    caption: str
    image_id: int | str | None = None
    dialog: Annotated[list[_Texts], Field(min_length=ROUNDS, max_length=ROUNDS)]


class _NumberedItem(_Part):
    caption: str
    image_id: int | str | None = None
    dialog: Annotated[list[_Numbers], Field(min_length=ROUNDS, max_length=ROUNDS)]


class _NumberedData(_Part):
    questions: list[str]
    answers: list[str]
    dialogs: Annotated[list[_NumberedItem], Field(min_length=1)]


class _Numbered(_Part):
    data: _NumberedData


class _Scene(_Part):
    model_config = ConfigDict(extra="forbid")
    caption: str
    image: Annotated[int, Field(ge=0)]
    dialog: Annotated[list[_Texts], Field(max_length=ROUNDS)]
    rewards: list[float]


_ITEMS = TypeAdapter(Annotated[list[_Item], Field(min_length=1)])
_SCENE_LIST = TypeAdapter(list[_Scene])
_CACHE = TypeAdapter(
    list[Annotated[list[float], Field(min_length=1 + ROUNDS, max_length=1 + ROUNDS)]],
    config=ConfigDict(strict=True, allow_inf_nan=False),
)


def read_dialogues(path: str | Path) -> tuple[list[Dialogue], list[int | str | None]]:
    """The dialogues of a split, and the ``image_id`` of each (None if it has none).

    Questions in the files have no question mark; it is appended. The file is a list of dialogues, as of VisDial 0.5,
    which the ILQL paper uses, or has the layout of versions 0.9 and 1.0:
    ``{"data": {"questions": texts, "answers": texts, "dialogs": [...]}}``, where dialogues have the numbers of their
    questions and answers.

    Raises:
        FileError: the file cannot be read, or a dialogue does not have a caption and ten rounds with answers, as in the
            test split of VisDial 1.0.
    """
    text = _text(path, _DIALOGUES)
    if not text.lstrip().startswith("{"):
        items = _parsed(_ITEMS, text, path, _DIALOGUES)
        return [_dialogue(item.caption, item.dialog) for item in items], [item.image_id for item in items]
    data = _parsed(TypeAdapter(_Numbered), text, path, _NUMBERED).data
    dialogues = []
    for number, item in enumerate(data.dialogs):
        try:
            rounds = [
                _Texts(question=data.questions[each.question], answer=data.answers[each.answer]) for each in item.dialog
            ]
        except IndexError as error:
            found = f'has a number in "data.dialogs.{number}.dialog" for which there is no text'
            raise FileError(path, found, _NUMBERED) from error
        dialogues.append(_dialogue(item.caption, rounds))
    return dialogues, [item.image_id for item in data.dialogs]


def read_reward_cache(path: str | Path, dialogues: int) -> list[tuple[float, ...]]:
    """For each of a number of dialogues the initial value and its change in each round, 11 numbers.

    Raises:
        FileError: the file cannot be read, or holds another number of dialogues, or does not hold 11 finite numbers for
            one.
    """
    rows = _parsed(_CACHE, _text(path, _REWARDS), path, _REWARDS)
    if len(rows) != dialogues:
        raise FileError(path, f"holds the rewards of {len(rows)} dialogues, expected {dialogues}", _REWARDS)
    return [tuple(row) for row in rows]


def read_additional_scenes(path: str | Path, images: int) -> list[SceneRecord]:
    """Further dialogues about the images of a split, such as those of a policy, with 0 to 10 rounds.

    The ILQL paper's code stores them as pickles, which are never read. Here the file is a JSON list of
    ``{"caption": ..., "image": row of the features, "dialog": [{"question": ..., "answer": ...}, ...],
    "rewards": [initial value, change in each round]}``.

    Raises:
        FileError: the file cannot be read or a scene is not of this form.
    """
    scenes = []
    for number, item in enumerate(_parsed(_SCENE_LIST, _text(path, _SCENES), path, _SCENES)):
        if item.image >= images:
            raise FileError(path, f'has {item.image} as "{number}.image", of {images} rows of the features', _SCENES)
        if len(item.rewards) != 1 + len(item.dialog):
            found = f'has {len(item.rewards)} numbers as "{number}.rewards" of {len(item.dialog)} rounds'
            raise FileError(path, found, _SCENES)
        scenes.append(SceneRecord(_dialogue(item.caption, item.dialog), item.image, tuple(item.rewards)))
    return scenes


def _text(path: str | Path, remedy: str) -> str:
    return read_text(path, remedy=remedy, max_bytes=_MAX_BYTES)


def _parsed(expected: TypeAdapter[Any], text: str, path: str | Path, remedy: str) -> Any:
    try:
        return expected.validate_json(text)
    except ValidationError as error:
        raise FileError(path, mistake(error), remedy) from None


def _dialogue(caption: str, rounds: Sequence[_Texts]) -> Dialogue:
    asked = [each.question if each.question.endswith("?") else f"{each.question}?" for each in rounds]
    return Dialogue(caption, tuple(Round(one, each.answer) for one, each in zip(asked, rounds, strict=True)))
