"""The real layouts are read as they are, and every mistake is named; generated files have them."""

import json
import pickle

import numpy as np
import pytest
import torch

from tests.envs.visual_dialogue import real_files
from torchrl_lang._files import FileError
from torchrl_lang.envs.visual_dialogue import DialogueRewards, VisualDialogues, files, generate_visual_dialogues
from torchrl_lang.envs.visual_dialogue.dialogue import Round
from torchrl_lang.envs.visual_dialogue.generate import ATTRIBUTES, CAPTIONS, YES_NO
from torchrl_lang.envs.visual_dialogue.rewards import STOP, is_yes_no

SCENE = {"caption": "a dog", "image": 2, "dialog": [{"question": "is it red?", "answer": "no"}], "rewards": [0.5, 0.1]}


def test_dialogues_have_ten_rounds_with_question_marks(tmp_path):
    dialogues, image_ids = files.read_dialogues(real_files.write_dialogues(tmp_path / "visdial_0.5_train.json", 3))
    assert image_ids == [378461, 378462, 378463]
    assert dialogues[2].caption == f"{real_files.CAPTION} 2"
    assert len(dialogues[1].rounds) == 10
    assert dialogues[1].rounds[0] == Round("is it sunny in round 0?", "i can't tell 1")
    assert dialogues[1].rounds[9] == Round("is it sunny in round 9?", "yes")
    changed = real_files.write_dialogues(tmp_path / "d.json", 1, change=lambda items: items[0].pop("image_id"))
    assert files.read_dialogues(changed)[1] == [None]
    # VisDial 1.0 has the numbers of its texts.
    numbered = real_files.write_numbered(tmp_path / "visdial_1.0_train.json", 3)
    assert files.read_dialogues(numbered) == (dialogues, image_ids)


def test_files_of_another_version_take_the_place_of_0_5(tmp_path):
    named = [files.SplitFiles.in_folder(tmp_path, "train").dialogues.name]
    for version in ("0.9", "1.0", "0.5"):
        (tmp_path / f"visdial_{version}_train.json").touch()
        named.append(files.SplitFiles.in_folder(tmp_path, "train").dialogues.name)
    assert named == [f"visdial_{version}_train.json" for version in ("0.5", "0.9", "1.0", "0.5")]


DAMAGED_1_0 = {  # a change, and a part of the message
    "no last answer": (lambda data: data["dialogs"][1]["dialog"][9].pop("answer"), r"1\.dialog\.9\.answer.*test split"),
    "nine rounds": (lambda data: data["dialogs"][1]["dialog"].pop(), r"data\.dialogs\.1\.dialog.*10"),
    "no such text": (lambda data: data["dialogs"][0]["dialog"][2].update(question=99), r"dialogs\.0.*no text: give"),
    "no dialogue": (lambda data: data["dialogs"].clear(), r"data\.dialogs"),
}


@pytest.mark.parametrize(("change", "found"), DAMAGED_1_0.values(), ids=DAMAGED_1_0)
def test_damaged_files_of_visdial_1_0(tmp_path, change, found):
    with pytest.raises(FileError, match=rf"visdial_1.0_test.json .*{found}"):
        files.read_dialogues(real_files.write_numbered(tmp_path / "visdial_1.0_test.json", 2, change=change))


@pytest.mark.parametrize(
    ("place", "value"),
    [(["caption"], None), (["dialog", 9], None), (["dialog", 4, "answer"], None), (["image_id"], [1]), ([], "x")],
)
def test_damaged_dialogues(tmp_path, place, value):
    """A value of the second dialogue is another one, or missing (None); the error names it."""

    def change(items):
        *outer, last = [1, *place]
        inside = items
        for key in outer:
            inside = inside[key]
        if value is None:
            del inside[last]
        else:
            inside[last] = value

    named = ["1", *map(str, place[:1] if place == ["dialog", 9] else place)]
    with pytest.raises(FileError, match=rf'visdial_0\.5_val\.json has .*"{".".join(named)}'):
        files.read_dialogues(real_files.write_dialogues(tmp_path / "visdial_0.5_val.json", 2, change=change))


def test_other_files_are_not_dialogues_or_scenes(tmp_path):
    path = tmp_path / "d.json"
    for content in (b'{"data": []}', b"[1", b"[]", b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00]\x94."):  # a pickle
        path.write_bytes(content)
        with pytest.raises(FileError, match=r"d\.json"):
            files.read_dialogues(path)
    with pytest.raises(FileError, match="is not UTF-8 text"):
        files.read_additional_scenes(path, images=3)


def test_damaged_reward_caches(tmp_path):
    path = tmp_path / "val_reward_cache2.json"
    row, nan = [0.5] * 11, float("nan")
    for content, found in (([row], "1 dialogues, expected 2"), ([row, row[:10]], '"1"'),
                           ([row, [*row[:10], "x"]], '"1.10"'), ([[nan] * 11] * 2, '"0.0"')):  # fmt: skip
        path.write_text(json.dumps(content))
        with pytest.raises(FileError, match=rf"val_reward_cache2\.json .*{found}"):
            files.read_reward_cache(path, 2)


def test_additional_scenes(tmp_path):
    path = tmp_path / "scenes.json"
    path.write_text(json.dumps([SCENE, {**SCENE, "dialog": [], "rewards": [0.25]}]))
    one, none = files.read_additional_scenes(path, images=3)
    assert (one.image, one.rewards, one.dialogue.rounds) == (2, (0.5, 0.1), (Round("is it red?", "no"),))
    assert (none.dialogue.rounds, none.rewards) == ((), (0.25,))
    for changed, found in (({"image": 3}, "item 0 with image 3 of 3"), ({"rewards": [0.5]}, "1 rewards of 1 rounds"),
                           ({"stop": True}, r"0\.stop"), ({"dialog": SCENE["dialog"] * 11}, r"0\.dialog")):  # fmt: skip
        path.write_text(json.dumps([{**SCENE, **changed}]))
        with pytest.raises(FileError, match=found):
            files.read_additional_scenes(path, images=3)


@pytest.fixture(params=["hdf5", "npy"])
def written(request, tmp_path):
    """A file of features by split, and what it holds."""
    raw = real_files.raw_features(7)
    if request.param == "hdf5":
        pytest.importorskip("h5py")
        return real_files.write_hdf5(tmp_path / "data_img.h5", train=real_files.raw_features(3), val=raw), raw
    np.save(tmp_path / "images_val.npy", raw)
    return tmp_path / "images_val.npy", raw


def test_rows_in_any_order(written):
    path, raw = written
    features = files.ImageFeatures(path, "val")
    assert (len(features), features.feature_size) == (7, real_files.FEATURES)
    found = features.rows([5, 0, 5, 2])
    expected = raw[[5, 0, 5, 2]] / np.sqrt((raw[[5, 0, 5, 2]] ** 2).sum(1, keepdims=True))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
    assert features.rows([]).shape == (0, real_files.FEATURES)
    assert torch.equal(torch.cat(list(features.blocks(3))), features.all())
    assert torch.equal(features.all(), features.rows(range(7)))
    copy = pickle.loads(pickle.dumps(features))  # noqa: S301 (as a data loader sends it to its workers)
    assert torch.equal(copy.rows([3]), features.rows([3]))


@pytest.mark.parametrize(("value", "found"), [(0.0, "with the norm 0.0"), (np.nan, "with the norm nan")])
def test_rows_without_a_direction(tmp_path, value, found):
    raw = real_files.raw_features(5)
    raw[3] = value
    np.save(tmp_path / "images_val.npy", raw)
    features = files.ImageFeatures(tmp_path / "images_val.npy", "val")
    assert features.rows([0, 4]).isfinite().all()
    with pytest.raises(FileError, match=f"row 3.* {found}"):
        features.rows([4, 3])


def test_wrong_arrays(tmp_path):
    path, match = tmp_path / "images_val.npy", r"has no array of floating-point numbers .*its shape is"
    for array in (np.ones(5), np.ones((5, 4), dtype=int), np.ones((0, 4)), np.ones((2, 3, 4))):
        np.save(path, array)
        with pytest.raises(FileError, match=match):
            files.ImageFeatures(path, "val")
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileError, match=r"has no array .*that can be read"):  # pickles are never read
        files.ImageFeatures(path, "val")


def test_hdf5_files_that_are_none_or_have_no_such_split(tmp_path):
    pytest.importorskip("h5py")
    path = real_files.write_hdf5(tmp_path / "data_img.h5", train=real_files.raw_features(2))
    with pytest.raises(FileError, match='has no dataset "images_val" '):
        files.ImageFeatures(path, "val")
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(FileError, match="that can be read"):
        files.ImageFeatures(path, "train")
    with pytest.raises(FileError, match="is missing"):
        files.ImageFeatures(tmp_path / "other.h5", "train")


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
    assert len(files.ImageFeatures(tmp_path / "data" / "data_img.h5", "val")) == 20
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
    assert {*ATTRIBUTES, *CAPTIONS, *YES_NO}  # hashable all through: all later data would have what somebody changed


def test_dialogues_ask_each_attribute_once_and_none_of_the_caption(tmp_path):
    generate_visual_dialogues(tmp_path / "data", {"train": 100}, npy=True, yes_no=0.0)
    asked = {question: each.name for each in ATTRIBUTES for question, _ in each.open_questions}
    for item in json.loads((tmp_path / "data" / "visdial_0.5_train.json").read_text()):
        names = [asked[each["question"]] for each in item["dialog"]]
        assert len(set(names)) == 10
        assert any(not set(named) & set(names) for named, _ in CAPTIONS)
        assert not any(is_yes_no(each["answer"], "conservative") for each in item["dialog"])


ENDS = {
    "caption": "a dog",
    "image": 1,
    "dialog": [{"question": "is it red", "answer": "no"}, {"question": "where", "answer": "two"}],
    "rewards": [0.6, 0.1, 0.15],
}


@pytest.fixture
def make(tmp_path):
    """Two real-looking dialogues; after each round the percentile rises by a sixteenth, from 0.6."""
    np.save(tmp_path / "images_val.npy", real_files.raw_features(2, 8))

    def make(*extra, **rewards):
        (tmp_path / "extra.json").write_text(json.dumps(extra))
        more = {"rewards": real_files.write_rewards(tmp_path / "r.json", 2, **rewards)}
        more["additional"] = tmp_path / "extra.json"
        dialogues = real_files.write_dialogues(tmp_path / "d.json", 2)
        return VisualDialogues(dialogues, tmp_path / "images_val.npy", "val", **more)

    return make


def rewards_of(episode):
    return [turn.reward for turn in episode.turns if turn.by_agent]


def test_env_stops_cuts_at_the_first_last_round(make):
    # 0.0625 * 4 / 0.4 = 0.625 >= 0.5, but 0.0625 * 3 / 0.4 = 0.469. Answers alternate "i can't tell" and "yes".
    data = make()
    scene = data.scenes(DialogueRewards())[1]
    assert (len(scene.dialogue.rounds), scene.initial, scene.progress) == (4, 0.6, (0.0625,) * 4)
    first, second, *_ = data.episodes(DialogueRewards())[0].turns
    assert (first.text, second.text) == (f"{real_files.CAPTION} 0", "is it sunny in round 0?")
    assert rewards_of(make(later=0.001).episodes(DialogueRewards())[0]) == [-1] * 9 + [0]
    assert (scene.image, scene.stopped) == (1, False)
    closed = [-1, -3, -1, -2]
    expected = {"none": [-1, -1, -1, 0], "soft": closed, "hard": closed, "conservative": [-3, -3, -3, -2]}
    for penalty, rewards in expected.items():
        for episode in data.episodes(DialogueRewards(penalty=penalty)):
            assert rewards_of(episode) == rewards
            assert (episode.terminated, episode.truncated) == (True, False)
    assert rewards_of(data.episodes(DialogueRewards("10_stop"))[0]) == [0.0625] * 10
    assert rewards_of(data.episodes(DialogueRewards("10_stop", scale=16.0, shift=-0.5))[0]) == [0.5] * 10


def test_agent_stops_has_every_prefix(make):
    episodes = make().episodes(DialogueRewards("agent_stops", scale=2.0, shift=1.0))
    assert len(episodes) == 22
    for number, episode in enumerate(episodes):
        rounds = number % 11
        assert episode.turns[0].text == f"{real_files.CAPTION} {number // 11}"
        assert rewards_of(episode) == [1.125] * rounds + [0.0] * (rounds < 10)
        assert (episode.turns[-1].text == STOP) == (rounds < 10)
        assert episode.terminated


def test_additional_scenes_are_appended(make):
    data = make(ENDS)
    assert (len(data), len(data.scenes(DialogueRewards()))) == (2, 3)
    extra = data.scenes(DialogueRewards())[-1]
    assert (extra.image, extra.dialogue.rounds[0].question) == (1, "is it red?")
    assert rewards_of(data.episodes(DialogueRewards(penalty="hard"))[-1]) == [-3, 0]
    episodes = data.episodes(DialogueRewards("agent_stops"))
    assert len(episodes) == 23
    assert rewards_of(episodes[-1]) == [0.1, 0.15, 0.0]
    assert episodes[-1].turns[-1].text == STOP


@pytest.mark.parametrize(("mode", "rewards"), [("env_stops", [0.6, 0.1, 0.05]), ("10_stop", ENDS["rewards"])])
def test_additional_scenes_must_end(make, mode, rewards):
    data = make(ENDS, {**ENDS, "rewards": rewards})
    match = "item 0" if mode == "10_stop" else "item 1"
    with pytest.raises(FileError, match=rf"extra\.json has an {match} that does not end within its rounds"):
        data.scenes(DialogueRewards(mode))


def test_as_many_images_as_dialogues(tmp_path):
    np.save(tmp_path / "images_val.npy", real_files.raw_features(3))
    with pytest.raises(FileError, match=r"images_val\.npy holds 3 images, but .*holds 4 dialogues"):
        VisualDialogues(real_files.write_dialogues(tmp_path / "d.json", 4), tmp_path / "images_val.npy", "val")
