"""Generated files: the real names and forms, determined by the seed."""

import json

import numpy as np
import pytest

from torchrl_lang.envs.visual_dialogue import VisualDialogues, generate_visual_dialogues
from torchrl_lang.envs.visual_dialogue.files import ImageFeatures
from torchrl_lang.envs.visual_dialogue.generate import ATTRIBUTES, CAPTIONS, YES_NO
from torchrl_lang.envs.visual_dialogue.rewards import is_yes_no

SMALL = {"train": 40, "val": 20}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_have_the_real_form(tmp_path):
    generate_visual_dialogues(tmp_path / "data", SMALL, npy=True)
    items = json.loads((tmp_path / "data" / "visdial_0.5_train.json").read_text())
    assert len(items) == 40
    for item in items:
        assert list(item) == ["caption", "image_id", "dialog"]
        assert len(item["dialog"]) == 10
        assert not any(each["question"].endswith("?") for each in item["dialog"])
    data = VisualDialogues.in_folder(tmp_path / "data", "train")
    assert data.image_ids == list(range(1, 41))
    raw = np.load(tmp_path / "data" / "images_train.npy")
    assert (raw.dtype, raw.shape) == (np.float32, (40, 128))
    np.testing.assert_allclose((raw**2).sum(1), 1, rtol=1e-5)


def test_hdf5_with_features_of_the_real_size_by_seed(tmp_path):
    h5py = pytest.importorskip("h5py")
    for name, seed in (("data", 1), ("again", 1), ("other", 2)):
        generate_visual_dialogues(tmp_path / name, SMALL, feature_size=4096, seed=seed)
    with h5py.File(tmp_path / "data" / "data_img.h5") as file:
        shapes = {name: (each.shape, str(each.dtype)) for name, each in file.items()}
    assert shapes == {"images_train": ((40, 4096), "float32"), "images_val": ((20, 4096), "float32")}
    assert len(ImageFeatures(tmp_path / "data" / "data_img.h5", "val")) == 20
    made, again, other = (contents(tmp_path / name) for name in ("data", "again", "other"))
    assert made == again
    assert all(other[name] != content for name, content in made.items())


def test_both_kinds_of_questions_and_varying_words(tmp_path):
    generate_visual_dialogues(tmp_path / "data", {"train": 400}, npy=True)
    items = json.loads((tmp_path / "data" / "visdial_0.5_train.json").read_text())
    rounds = [each for item in items for each in item["dialog"]]
    closed = [is_yes_no(each["answer"], "conservative") for each in rounds]
    assert 0.45 < sum(closed) / len(closed) < 0.55
    holds = [each["answer"] in {yes for _, yes, _ in YES_NO} for each, kind in zip(rounds, closed, strict=True) if kind]
    assert 0.45 < sum(holds) / len(holds) < 0.55
    assert {each["answer"] for each in rounds} >= {answer for form in YES_NO for answer in form[1:]}
    asked = {each["question"] for each, kind in zip(rounds, closed, strict=True) if not kind}
    assert len(asked) == sum(len(attribute.open_questions) for attribute in ATTRIBUTES)
    assert len({item["caption"] for item in items}) > 100


def test_dialogues_ask_each_attribute_once_and_none_of_the_caption(tmp_path):
    generate_visual_dialogues(tmp_path / "data", {"train": 100}, npy=True, yes_no=0.0)
    asked = {question: each.name for each in ATTRIBUTES for question, _ in each.open_questions}
    for item in json.loads((tmp_path / "data" / "visdial_0.5_train.json").read_text()):
        names = [asked[each["question"]] for each in item["dialog"]]
        assert len(set(names)) == 10
        assert any(not set(named) & set(names) for named, _ in CAPTIONS)
        assert not any(is_yes_no(each["answer"], "conservative") for each in item["dialog"])
