"""Read the files of visual dialogues: dialogues, caches of rewards and additional scenes, all of them JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_lang._files import Fields, FileError, read_json_list, read_json_value, shorten
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round
from torchrl_lang.text.json_checks import check_keys, read_number, show

__all__ = [
    "ROUNDS",
    "SceneRecord",
    "SplitFiles",
    "read_additional_scenes",
    "read_dialogues",
    "read_reward_cache",
]

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
    """A dialogue of any length with the rewards of its rounds.

    Examples:
        >>> from torchrl_lang.envs.visual_dialogue import Dialogue, SceneRecord
        >>> SceneRecord(Dialogue("a dog"), image=3, rewards=(0.75,)).rewards[0]
        0.75
    """

    dialogue: Dialogue
    image: int
    """Row of its image in the features."""
    rewards: tuple[float, ...]
    """``[1 + rounds]``: the initial value, then the change in each round."""


def read_dialogues(path: str | Path) -> tuple[list[Dialogue], list[int | str | None]]:
    """The dialogues of a split, and the ``image_id`` of each (None if it has none).

    Questions in the files have no question mark; it is appended. Further fields, such as candidate answers, are
    ignored. The file is a list of dialogues, as of VisDial 0.5, which the ILQL paper uses, or has the layout of
    versions 0.9 and 1.0: ``{"data": {"questions": texts, "answers": texts, "dialogs": [...]}}``, where dialogues have
    the numbers of their questions and answers.

    Raises:
        FileError: the file cannot be read, or a dialogue does not have a caption and ten rounds with answers, as in the
            test split of VisDial 1.0.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.envs.visual_dialogue import read_dialogues
        >>> item = {"caption": "a dog", "image_id": 7, "dialog": [{"question": "is it red", "answer": "no"}] * 10}
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "visdial_0.5_train.json"
        ...     _ = path.write_text(json.dumps([item]))
        ...     dialogues, image_ids = read_dialogues(path)
        >>> dialogues[0].rounds[0], image_ids
        (Round(question='is it red?', answer='no'), [7])
    """
    dialogues, image_ids = list[Dialogue](), list[int | str | None]()
    texts, remedy = None, _DIALOGUES
    items = read_json_value(path, remedy=remedy, max_bytes=_MAX_BYTES)
    if isinstance(items, dict) and isinstance(items.get("data"), dict):
        remedy = _NUMBERED
        data = Fields(items, path, remedy).object("data")
        texts = {kind: data.list_of(f"{kind}s", str) for kind in ("question", "answer")}
        items = data.take("dialogs", list)
    if not isinstance(items, list):
        raise FileError(path, f"holds {shorten(items)}, not a JSON list", remedy)
    for number, content in enumerate(items):
        item = _item(content, number, path, remedy)
        dialogue = _dialogue(item, texts)
        if len(dialogue.rounds) != ROUNDS:
            raise item.error(f'has {len(dialogue.rounds)} rounds as "{item.name}.dialog", expected {ROUNDS}')
        dialogues.append(dialogue)
        image_ids.append(_image_id(item))
    if not dialogues:
        raise FileError(path, "holds no dialogue", remedy)
    return dialogues, image_ids


def read_reward_cache(path: str | Path, dialogues: int) -> list[tuple[float, ...]]:
    """For each of a number of dialogues the initial value and its change in each round, 11 numbers.

    Raises:
        FileError: the file cannot be read, or holds another number of dialogues, or does not hold 11 finite numbers for
            one.

    Examples:
        >>> import pathlib, tempfile
        >>> from torchrl_lang.envs.visual_dialogue import read_reward_cache
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "train_rank_reward_cache1.json"
        ...     _ = path.write_text(str([[0.5, 0.25] + [0] * 9]))
        ...     read_reward_cache(path, 1)[0][:3]
        (0.5, 0.25, 0.0)
    """
    content = read_json_list(path, remedy=_REWARDS)
    if len(content) != dialogues:
        raise FileError(path, f"holds the rewards of {len(content)} dialogues, expected {dialogues}", _REWARDS)
    return [_numbers(values, f"item {number}", 1 + ROUNDS, path, _REWARDS) for number, values in enumerate(content)]


def read_additional_scenes(path: str | Path, images: int) -> list[SceneRecord]:
    """Further dialogues about the images of a split, such as those of a policy, with 0 to 10 rounds.

    The ILQL paper's code stores them as pickles, which are never read. Here the file is a JSON list of
    ``{"caption": ..., "image": row of the features, "dialog": [{"question": ..., "answer": ...}, ...],
    "rewards": [initial value, change in each round]}``.

    Raises:
        FileError: the file cannot be read or a scene is not of this form.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.envs.visual_dialogue import read_additional_scenes
        >>> rounds = [{"question": "is it red?", "answer": "no"}]
        >>> scene = {"caption": "a dog", "image": 4, "dialog": rounds, "rewards": [0.5, 0.25]}
        >>> with tempfile.TemporaryDirectory() as home:
        ...     path = pathlib.Path(home) / "scenes.json"
        ...     _ = path.write_text(json.dumps([scene]))
        ...     read_additional_scenes(path, images=5)[0].image
        4
    """
    scenes = []
    for number, content in enumerate(read_json_list(path, remedy=_SCENES, max_bytes=_MAX_BYTES)):
        item = _item(content, number, path, _SCENES)
        try:
            check_keys(content, ["caption", "image", "dialog", "rewards"], "it")
        except ValueError as error:
            raise FileError(path, f"has a wrong {item.name} ({error})", _SCENES) from error
        dialogue, image = _dialogue(item), item.at_least("image", 0)
        if image >= images:
            raise item.error(f'has {image} as "{item.name}.image", but the features have {images} rows')
        if len(dialogue.rounds) > ROUNDS:
            raise item.error(f'has {len(dialogue.rounds)} rounds as "{item.name}.dialog", expected at most {ROUNDS}')
        expected = 1 + len(dialogue.rounds)
        rewards = _numbers(item.take("rewards", list), f"{item.name}.rewards", expected, path, _SCENES)
        scenes.append(SceneRecord(dialogue, image, rewards))
    return scenes


def _item(content: Any, number: int, path: str | Path, remedy: str) -> Fields:
    """The fields of one entry of the list; an error in one of them names it, such as ``item 3.caption``."""
    if not isinstance(content, Mapping):
        raise FileError(path, f"has {show(content)} as item {number}, expected a JSON object", remedy)
    return Fields(content, path, remedy, f"item {number}")


def _dialogue(item: Fields, texts: Mapping[str, Sequence[str]] | None = None) -> Dialogue:
    """The dialogue of an entry, whose rounds have ``texts`` by their numbers, or without these the texts themselves."""

    def text(fields: Fields, kind: str) -> str:
        if texts is None:
            return fields.take(kind, str)
        place = fields.at_least(kind, 0)
        if place >= len(texts[kind]):
            raise fields.error(
                f'has {place} as "{fields.name}.{kind}", but "data.{kind}s" has {len(texts[kind])} texts'
            )
        return texts[kind][place]

    rounds = []
    for number, content in enumerate(item.take("dialog", list)):
        name = f"{item.name}.dialog.{number}"
        if not isinstance(content, Mapping):
            raise item.error(f'has {show(content)} as "{name}", expected a JSON object')
        fields = Fields(content, item.path, item.remedy, name)
        question = text(fields, "question")
        rounds.append(Round(question if question.endswith("?") else f"{question}?", text(fields, "answer")))
    return Dialogue(item.take("caption", str), tuple(rounds))


def _image_id(item: Fields) -> int | str | None:
    value = item.content.get("image_id")
    if isinstance(value, bool) or not isinstance(value, int | str | None):
        raise item.error(f'has {show(value)} as "{item.name}.image_id", expected a number or a name')
    return value


def _numbers(values: Any, name: str, expected: int, path: str | Path, remedy: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != expected:
        found = f"{len(values)} values" if isinstance(values, list) else show(values)
        raise FileError(path, f'has {found} as "{name}", expected {expected} numbers', remedy)
    try:
        return tuple(read_number(value, f"number {place}") for place, value in enumerate(values))
    except ValueError as error:
        raise FileError(path, f'has a wrong "{name}" ({error})', remedy) from error
