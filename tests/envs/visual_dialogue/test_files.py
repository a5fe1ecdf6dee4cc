"""The real layouts are read as they are, and every mistake names file, item and field."""

import json

import pytest

from tests.envs.visual_dialogue.real_files import CAPTION, write_dialogues, write_numbered, write_rewards
from torchrl_lang._files import FileError
from torchrl_lang.envs.visual_dialogue import (
    Round,
    SplitFiles,
    read_additional_scenes,
    read_dialogues,
    read_reward_cache,
)

SCENE = {"caption": "a dog", "image": 2, "dialog": [{"question": "is it red?", "answer": "no"}], "rewards": [0.5, 0.1]}


def test_dialogues_have_ten_rounds_with_question_marks(tmp_path):
    dialogues, image_ids = read_dialogues(write_dialogues(tmp_path / "visdial_0.5_train.json", 3))
    assert image_ids == [378461, 378462, 378463]
    assert dialogues[2].caption == f"{CAPTION} 2"
    assert len(dialogues[1].rounds) == 10
    assert dialogues[1].rounds[0] == Round("is it sunny in round 0?", "i can't tell 1")
    assert dialogues[1].rounds[9] == Round("is it sunny in round 9?", "yes")


def test_a_question_mark_is_not_repeated_and_image_ids_may_be_missing(tmp_path):
    def change(items):
        items[0]["dialog"][3]["question"] = "why?"
        del items[0]["image_id"]

    dialogues, image_ids = read_dialogues(write_dialogues(tmp_path / "d.json", 1, change=change))
    assert dialogues[0].rounds[3].question == "why?"
    assert image_ids == [None]


def test_visdial_1_0_has_the_numbers_of_its_texts(tmp_path):
    given = read_dialogues(write_numbered(tmp_path / "visdial_1.0_train.json", 3))
    assert given == read_dialogues(write_dialogues(tmp_path / "visdial_0.5_train.json", 3))


def test_files_of_another_version_take_the_place_of_0_5(tmp_path):
    named = [SplitFiles.in_folder(tmp_path, "train").dialogues.name]
    for version in ("0.9", "1.0", "0.5"):
        (tmp_path / f"visdial_{version}_train.json").touch()
        named.append(SplitFiles.in_folder(tmp_path, "train").dialogues.name)
    assert named == [f"visdial_{version}_train.json" for version in ("0.5", "0.9", "1.0", "0.5")]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda data: data["dialogs"][1]["dialog"][9].pop("answer"),
            r'no field "item 1\.dialog\.9\.answer".*test split',
        ),
        (lambda data: data["dialogs"][1]["dialog"].pop(), 'has 9 rounds as "item 1.dialog", expected 10'),
        (
            lambda data: data["dialogs"][0]["dialog"][2].update(question=99),
            r'99 as ".*2\.question", but .* has 11 texts',
        ),
        (lambda data: data["dialogs"][0]["dialog"][2].update(answer=-1), 'has -1 as "item 0.dialog.2.answer"'),
        (lambda data: data["dialogs"][0]["dialog"][2].update(answer="yes"), "expected int"),
        (lambda data: data.pop("answers"), 'has no field "data.answers"'),
        (lambda data: data["questions"].append(7), 'has 7 as "data.questions.11", expected str'),
        (lambda data: data["dialogs"].clear(), "holds no dialogue"),
    ],
)
def test_damaged_files_of_visdial_1_0(tmp_path, change, found):
    with pytest.raises(FileError, match=rf"visdial_1.0_test.json .*{found}"):
        read_dialogues(write_numbered(tmp_path / "visdial_1.0_test.json", 2, change=change))


def damage(place, value):
    """Replace the value at a path of keys in the second dialogue; None removes it."""

    def change(items):
        inside = items[1]
        for key in place[:-1]:
            inside = inside[key]
        if value is None:
            del inside[place[-1]]
        else:
            inside[place[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (damage(["caption"], None), 'has no field "item 1.caption"'),
        (damage(["caption"], 7), 'has 7 as "item 1.caption", expected str'),
        (damage(["dialog"], "x"), "has 'x' as \"item 1.dialog\", expected list"),
        (damage(["dialog", 9], None), 'has 9 rounds as "item 1.dialog", expected 10'),
        (damage(["dialog", 4], ["q", "a"]), 'has ["q", "a"] as "item 1.dialog.4", expected a JSON object'),
        (damage(["dialog", 4, "answer"], None), 'has no field "item 1.dialog.4.answer"'),
        (damage(["dialog", 0, "question"], [1]), 'has [1] as "item 1.dialog.0.question", expected str'),
        (damage(["image_id"], [1]), 'has [1] as "item 1.image_id"'),
        (lambda items: items.__setitem__(1, "x"), 'has "x" as item 1, expected a JSON object'),
        (lambda items: items.clear(), "holds no dialogue"),
    ],
)
def test_damaged_dialogues(tmp_path, change, found):
    path = write_dialogues(tmp_path / "visdial_0.5_val.json", 2, change=change)
    with pytest.raises(FileError, match=r"visdial_0\.5_val\.json") as caught:
        read_dialogues(path)
    assert found in str(caught.value)


@pytest.mark.parametrize("content", ['{"data": []}', "[1", "\x80\x04pickle"])
def test_other_files_are_not_dialogues(tmp_path, content):
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(FileError, match=r"d\.json (holds|is not)"):
        read_dialogues(path)


def test_both_reward_caches(tmp_path):
    files = SplitFiles.in_folder(tmp_path, "train")
    assert (files.rank_rewards.name, files.distance_rewards.name) == (
        "train_rank_reward_cache1.json",
        "train_reward_cache2.json",
    )
    assert (files.dialogues.name, files.features.name) == ("visdial_0.5_train.json", "data_img.h5")
    assert read_reward_cache(write_rewards(files.rank_rewards, 2), 2) == [(0.6, *[0.0625] * 10)] * 2


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([[0.5] * 11], "holds the rewards of 1 dialogues, expected 2"),
        ([[0.5] * 11, [0.5] * 10], 'has 10 values as "item 1", expected 11 numbers'),
        ([[0.5] * 11, 3], 'has 3 as "item 1", expected 11 numbers'),
        ([[0.5] * 11, "0123456789a"], 'has "0123456789a" as "item 1"'),
        ([[0.5] * 11, [0.5] * 10 + ["x"]], 'has a wrong "item 1" (number 10 must be a finite number, got "x")'),
        ([[0.5] * 11, [True] * 11], 'has a wrong "item 1" (number 0 must be'),
    ],
)
def test_damaged_reward_caches(tmp_path, content, found):
    path = tmp_path / "val_reward_cache2.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"val_reward_cache2\.json") as caught:
        read_reward_cache(path, 2)
    assert found in str(caught.value)


def test_rewards_that_are_not_numbers_of_json(tmp_path):
    path = tmp_path / "cache.json"
    path.write_text(f"[[{', '.join(['NaN'] * 11)}]]")
    with pytest.raises(FileError, match="NaN is not a JSON number"):
        read_reward_cache(path, 1)


def test_additional_scenes_of_any_length(tmp_path):
    path = tmp_path / "scenes.json"
    path.write_text(json.dumps([SCENE, {**SCENE, "dialog": [], "rewards": [0.25]}]))
    one, none = read_additional_scenes(path, images=3)
    assert (one.image, one.rewards, one.dialogue.rounds) == (2, (0.5, 0.1), (Round("is it red?", "no"),))
    assert (none.dialogue.rounds, none.rewards) == ((), (0.25,))


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"image": 3}, 'has 3 as "item 0.image", but the features have 3 rows'),
        ({"image": -1}, 'has -1 as "item 0.image", expected at least 0'),
        ({"rewards": [0.5]}, 'has 1 values as "item 0.rewards", expected 2 numbers'),
        ({"stop": True}, "unknown keys ['stop']"),
        ({"dialog": SCENE["dialog"] * 11, "rewards": [0.5] * 12}, 'has 11 rounds as "item 0.dialog"'),
    ],
)
def test_damaged_additional_scenes(tmp_path, changed, found):
    path = tmp_path / "scenes.json"
    path.write_text(json.dumps([{**SCENE, **changed}]))
    with pytest.raises(FileError) as caught:
        read_additional_scenes(path, images=3)
    assert found in str(caught.value)


def test_pickles_are_never_read(tmp_path):
    path = tmp_path / "scenes.pkl"
    path.write_bytes(b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00]\x94.")
    with pytest.raises(FileError, match="is not UTF-8 text"):
        read_additional_scenes(path, images=3)
