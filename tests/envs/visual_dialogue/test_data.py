"""Scenes and episodes of every mode, from files of the real layouts, with rewards worked out by hand."""

import json

import numpy as np
import pytest

from tests.envs.visual_dialogue.real_files import CAPTION, raw_features, write_dialogues, write_hdf5, write_rewards
from torchrl_lang._files import FileError
from torchrl_lang.envs.visual_dialogue import DialogueRewards, VisualDialogues
from torchrl_lang.envs.visual_dialogue.rewards import STOP

EXTRA = {
    "caption": "a dog",
    "image": 1,
    "dialog": [{"question": "is it red", "answer": "no"}, {"question": "where", "answer": "two"}],
    "rewards": [0.6, 0.1, 0.15],
}


@pytest.fixture
def make(tmp_path):
    """Two real-looking dialogues; after each round the percentile rises by a sixteenth, from 0.6."""
    np.save(tmp_path / "images_val.npy", raw_features(2, 8))

    def make(*extra, **rewards):
        (tmp_path / "extra.json").write_text(json.dumps(extra))
        return VisualDialogues(
            write_dialogues(tmp_path / "d.json", 2),
            tmp_path / "images_val.npy",
            "val",
            rewards=write_rewards(tmp_path / "r.json", 2, **rewards),
            additional=tmp_path / "extra.json",
        )

    return make


def rewards_of(episode):
    return [turn.reward for turn in episode.turns if turn.by_agent]


def test_env_stops_cuts_at_the_first_last_round(make):
    # 0.0625 * 4 / 0.4 = 0.625 >= 0.5, but 0.0625 * 3 / 0.4 = 0.469. Answers alternate "i can't tell" and "yes".
    data = make()
    scene = data.scenes(DialogueRewards())[1]
    assert (len(scene.dialogue.rounds), scene.initial, scene.progress) == (4, 0.6, (0.0625,) * 4)
    first, second, *_ = data.episodes(DialogueRewards())[0].turns
    assert (first.text, second.text) == (f"{CAPTION} 0", "is it sunny in round 0?")
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
        assert episode.turns[0].text == f"{CAPTION} {number // 11}"
        assert rewards_of(episode) == [1.125] * rounds + [0.0] * (rounds < 10)
        assert (episode.turns[-1].text == STOP) == (rounds < 10)
        assert episode.terminated


def test_additional_scenes_are_appended(make):
    data = make(EXTRA)
    assert (len(data), len(data.scenes(DialogueRewards()))) == (2, 3)
    extra = data.scenes(DialogueRewards())[-1]
    assert (extra.image, extra.dialogue.rounds[0].question) == (1, "is it red?")
    assert rewards_of(data.episodes(DialogueRewards(penalty="hard"))[-1]) == [-3, 0]
    episodes = data.episodes(DialogueRewards("agent_stops"))
    assert len(episodes) == 23
    assert rewards_of(episodes[-1]) == [0.1, 0.15, 0.0]
    assert episodes[-1].turns[-1].text == STOP


@pytest.mark.parametrize(("mode", "rewards"), [("env_stops", [0.6, 0.1, 0.05]), ("10_stop", EXTRA["rewards"])])
def test_additional_scenes_must_end(make, mode, rewards):
    data = make(EXTRA, {**EXTRA, "rewards": rewards})
    match = "item 0" if mode == "10_stop" else "item 1"
    with pytest.raises(FileError, match=rf"extra\.json has an {match} that does not end within its rounds"):
        data.scenes(DialogueRewards(mode))


def test_the_real_files_together(tmp_path):
    pytest.importorskip("h5py")
    data = VisualDialogues(
        write_dialogues(tmp_path / "visdial_0.5_train.json", 4),
        write_hdf5(tmp_path / "data_img.h5", train=raw_features(4), val=raw_features(2)),
        "train",
        rewards=write_rewards(tmp_path / "train_rank_reward_cache1.json", 4),
    )
    assert data.features.rows([3]).shape == (1, 4096)
    assert len(data.episodes(DialogueRewards())) == 4
    np.save(tmp_path / "images_val.npy", raw_features(3))
    with pytest.raises(FileError, match=r"images_val\.npy holds 3 images, but .*holds 4 dialogues"):
        VisualDialogues(tmp_path / "visdial_0.5_train.json", tmp_path / "images_val.npy", "val")
