"""Generate visual dialogues in the files of the real dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from torchrl_lang._checks import at_least_one, within
from torchrl_lang._files import refuse_content, write_file, write_folder
from torchrl_lang.envs.visual_dialogue.files import ROUNDS, SplitFiles
from torchrl_lang.envs.visual_dialogue.hdf5 import write_hdf5
from torchrl_lang.envs.visual_dialogue.makers.attributes import ATTRIBUTES, CAPTIONS, YES_NO, Attribute
from torchrl_lang.envs.visual_dialogue.makers.images import image_features

__all__ = ["SPLITS", "generate_visual_dialogues"]

SPLITS: Mapping[str, int] = {"train": 3000, "val": 500, "test": 500}
"""Default numbers of dialogues."""

_LEAST_FEATURES = 64


def generate_visual_dialogues(
    folder: str | Path,
    splits: Mapping[str, int] = SPLITS,
    *,
    feature_size: int = 128,
    yes_no: float = 0.5,
    seed: int = 0,
    npy: bool = False,
) -> None:
    """Write dialogues about generated images, and their features, under the names of the real dataset's files.

    An image has twelve attributes of two to six values. Its caption names one or two of them; each of the ten rounds
    asks for one of the others, openly ("what colour is the animal") or with yes or no ("is the animal white", half of
    the time with the true value). The same arguments write the same files. Caches of rewards are not among them: they
    hold the values of a trained guesser.

    Args:
        folder: the folder to create.
        splits: number of dialogues of each split.
        feature_size: ``F``, at least 64; VGG-19 features have 4096.
        yes_no: fraction of yes-or-no questions.
        seed: of attributes, noise and texts. Datasets of different seeds show the same world.
        npy: write ``images_<split>.npy`` instead of HDF5, which needs no further package.

    Raises:
        ValueError: a number is out of range.
        FileExistsError: the folder exists and is not empty.
        ImportError: HDF5 needs h5py, which is not installed.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.envs.visual_dialogue import SplitFiles, generate_visual_dialogues, read_dialogues
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_visual_dialogues(home, {"train": 20}, npy=True)
        ...     dialogues, _ = read_dialogues(SplitFiles.in_folder(home, "train").dialogues)
        >>> dialogues[0].caption, dialogues[0].rounds[2]
        ('a woman is having fun', Round(question='how many persons can you see?', answer='i see four'))
    """
    at_least_one("the number of splits", len(splits))
    for name, many in splits.items():
        at_least_one(f"splits[{name!r}]", many)
    within("feature_size", feature_size, _LEAST_FEATURES, 1 << 20)
    within("yes_no", yes_no, 0.0, 1.0)
    refuse_content(folder)
    features = dict[str, np.ndarray]()
    with write_folder(folder) as target:
        first = 1
        for number, (split, many) in enumerate(splits.items()):
            rng, random = np.random.default_rng([seed, number]), Random(f"{seed} {number}")
            values = np.stack([rng.integers(len(attribute.values), size=many) for attribute in ATTRIBUTES], axis=1)
            features[f"images_{split}"] = image_features(values, feature_size, rng)
            items = [_item(image, first + place, yes_no, random) for place, image in enumerate(values.tolist())]
            write_file(SplitFiles.in_folder(target, split).dialogues, json.dumps(items))
            first += many
        if npy:
            for name, array in features.items():
                np.save(target / f"{name}.npy", array)
        else:
            write_hdf5(target / "data_img.h5", features)


def _item(values: list[int], image_id: int, yes_no: float, random: Random) -> dict[str, Any]:
    """A dialogue as in the real files: questions without a question mark."""
    shown = {each.name: each.values[value] for each, value in zip(ATTRIBUTES, values, strict=True)}
    named, forms = random.choice(CAPTIONS)
    others = [each for each in ATTRIBUTES if each.name not in named]
    rounds = [
        _yes_no_round(each, shown[each.name], random)
        if random.random() < yes_no
        else _open_round(each, shown[each.name], random)
        for each in random.sample(others, ROUNDS)
    ]
    caption = random.choice(forms).format(*(shown[name] for name in named))
    return {"caption": caption, "image_id": image_id, "dialog": rounds}


def _open_round(attribute: Attribute, value: str, random: Random) -> dict[str, str]:
    question, answer = random.choice(attribute.open_questions)
    return {"question": question, "answer": answer.format(value)}


def _yes_no_round(attribute: Attribute, value: str, random: Random) -> dict[str, str]:
    holds = random.random() < 0.5
    asked = value if holds else random.choice([other for other in attribute.values if other != value])
    form, yes, no = random.choice(YES_NO)
    return {"question": form.format(attribute.claim.format(asked)), "answer": yes if holds else no}
