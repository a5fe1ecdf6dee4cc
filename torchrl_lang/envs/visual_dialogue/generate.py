"""Generate visual dialogues about images of twelve attributes, in the files of the real dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from torchrl_lang._checks import check_options
from torchrl_lang._files import refuse_content, write_file, write_folder
from torchrl_lang.envs.visual_dialogue.files import ROUNDS, SplitFiles, h5py_module


class Attribute(NamedTuple):
    """A property of an image and how people ask about it."""

    name: str
    values: tuple[str, ...]
    open_questions: tuple[tuple[str, str], ...]
    """Question, and the reply with ``{}`` for the value."""
    claim: str
    """Of a yes-or-no question, with ``{}`` for the value asked about."""


def _frozen(value: Any) -> Any:
    """A JSON value with tuples for its lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_WORLD: dict[str, Any] = json.loads(Path(__file__).with_name("world.json").read_text(encoding="utf-8"))

ATTRIBUTES = tuple(Attribute(**{name: _frozen(value) for name, value in each.items()}) for each in _WORLD["attributes"])
CAPTIONS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = _frozen(_WORLD["captions"])
"""Attributes that a caption names, and its forms."""
YES_NO: tuple[tuple[str, str, str], ...] = _frozen(_WORLD["yes_no"])
"""Forms of yes-or-no questions with ``{}`` for the claim, and their replies if it holds and if not.

The first replies are yes-or-no answers under all of the paper's definitions, the second ones under "soft" and
"conservative", the third ones under "conservative" alone.
"""

SHARED_SCALE = 4.0
"""Length of a value's vector in the shared dimensions, relative to its length in all others."""

_SHARED = 4
_CAPTION_WEIGHT = 1.4
_NOISE = 0.5
_PROJECTION_SEED = 0


def image_features(values: np.ndarray, feature_size: int, rng: np.random.Generator) -> np.ndarray:
    """Features of images, L2-normalised, float32 ``[N, F]``, from the values of their attributes, int ``[N, A]``.

    ``f = x / |x|`` with ``x = sum_a w_a (s S[a, v_a] + G[a, v_a]) + noise``. The vectors ``G`` have independent random
    directions. The vectors ``S`` all lie in the same few dimensions and are ``s`` times longer: there the attributes
    that are still unknown hide the known ones, so the nearest images to a guess are the right ones only after many
    rounds, while ``G`` shows a model all attributes.

    Args:
        values: number of the value of each attribute.
        feature_size: ``F``.
        rng: draws the noise. The projection is the same for all datasets of one ``F``.
    """
    fixed = np.random.default_rng(_PROJECTION_SEED)
    shared = fixed.normal(size=(_SHARED, feature_size)) / np.sqrt(feature_size)
    features = rng.normal(size=(len(values), feature_size)) * (_NOISE / np.sqrt(feature_size))
    in_captions = {name for names, _ in CAPTIONS for name in names}
    for place, attribute in enumerate(ATTRIBUTES):
        many = len(attribute.values)
        hidden = fixed.normal(size=(many, _SHARED)) / np.sqrt(_SHARED) @ shared
        own = fixed.normal(size=(many, feature_size)) / np.sqrt(feature_size)
        weight = _CAPTION_WEIGHT if attribute.name in in_captions else 1.0
        features += weight * (SHARED_SCALE * hidden + own)[values[:, place]]
    return (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


SPLITS: Mapping[str, int] = {"train": 3000, "val": 500, "test": 500}
"""Default numbers of dialogues."""


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
        >>> from torchrl_lang.envs.visual_dialogue import VisualDialogues, generate_visual_dialogues
        >>> with tempfile.TemporaryDirectory() as home:
        ...     generate_visual_dialogues(home, {"train": 20}, npy=True)
        ...     dialogues = VisualDialogues.in_folder(home, "train").dialogues
        >>> dialogues[0].caption, dialogues[0].rounds[2]
        ('a woman is having fun', Round(question='how many persons can you see?', answer='i see four'))
    """
    least = {f"splits[{name!r}]": (many, 1) for name, many in splits.items()}
    check_options(feature_size=(feature_size, f"[64, {1 << 20}]"), yes_no=(yes_no, "[0, 1]"), **least)
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
        else:  # without times the same arrays give the same bytes
            with h5py_module().File(target / "data_img.h5", "w", track_order=False) as file:
                for name, array in features.items():
                    file.create_dataset(name, data=array, track_times=False)


def _item(values: list[int], image_id: int, yes_no: float, random: Random) -> dict[str, Any]:
    """A dialogue as in the real files: questions without a question mark."""
    shown = {each.name: each.values[value] for each, value in zip(ATTRIBUTES, values, strict=True)}
    named, forms = random.choice(CAPTIONS)
    others = [each for each in ATTRIBUTES if each.name not in named]
    asked = random.sample(others, ROUNDS)
    rounds = [_round(each, shown[each.name], random, closed=random.random() < yes_no) for each in asked]
    caption = random.choice(forms).format(*(shown[name] for name in named))
    return {"caption": caption, "image_id": image_id, "dialog": rounds}


def _round(attribute: Attribute, value: str, random: Random, *, closed: bool) -> dict[str, str]:
    if not closed:
        question, answer = random.choice(attribute.open_questions)
        return {"question": question, "answer": answer.format(value)}
    holds = random.random() < 0.5
    asked = value if holds else random.choice([other for other in attribute.values if other != value])
    form, yes, no = random.choice(YES_NO)
    return {"question": form.format(attribute.claim.format(asked)), "answer": yes if holds else no}
