"""Commands of visual dialogue on generated data: reward caches by models in process and behind HTTP."""

from __future__ import annotations

import json

import pytest

from tests.recipes.interrupt import interrupted_at
from torchrl_lang.__main__ import main
from torchrl_lang._files import folder_lock
from torchrl_lang.envs import visual_dialogue as vd
from torchrl_lang.envs.visual_dialogue.features import ImageFeatures
from torchrl_lang.envs.visual_dialogue.files import read_reward_cache
from torchrl_lang.envs.visual_dialogue.reward_recipe import VisualDialogueRewards
from torchrl_lang.envs.visual_dialogue.scoring import answer_and_score

DIALOGUES = 12


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Generated files of one split, and models that were trained on them for an instant."""
    folder = tmp_path_factory.mktemp("visual_dialogue")
    vd.generate_visual_dialogues(folder / "data", {"val": DIALOGUES}, feature_size=64, npy=True)
    files = vd.SplitFiles.in_folder(folder / "data", "val", npy=True)
    data = vd.VisualDialogues(files.dialogues, files.features, "val")
    options = vd.DialogueTraining(guesser_epochs=1, answerer_epochs=1, width=16)
    vd.save_dialogue_models(vd.train_dialogue_models(data.dialogues, data.features, options), folder / "models")
    return folder


@pytest.fixture(scope="module")
def local(home):
    files = vd.SplitFiles.in_folder(home / "data", "val", npy=True)
    return vd.LocalDialogueModels(home / "models", ImageFeatures(files.features, "val").all())


def rewards(home, out, *more):
    files = vd.SplitFiles.in_folder(home / "data", "val", npy=True)
    given = ["--dialogues", str(files.dialogues), "--features", str(files.features), "--split", "val"]
    return main(["rewards", "visual_dialogue", *given, "--out", str(out), "--batch-size", "5", *more])


def caches(folder):
    files = vd.SplitFiles.in_folder(folder, "val")
    return [json.loads(path.read_text()) for path in (files.rank_rewards, files.distance_rewards)]


@pytest.mark.slow
def test_caches_of_models_in_process_and_behind_http(home, local, tmp_path, capsys):
    pytest.importorskip("uvicorn")
    assert rewards(home, tmp_path / "local", "--models", str(home / "models")) == 0
    assert "12 of 12 dialogues" in capsys.readouterr().out
    with vd.DialogueServer(local) as server:
        assert rewards(home, tmp_path / "http", "--server", server.url) == 0
    assert caches(tmp_path / "local") == caches(tmp_path / "http")
    names = sorted(path.name for path in (tmp_path / "local").iterdir())
    assert names == ["val_rank_reward_cache1.json", "val_reward_cache2.json"]
    for path, start in zip(vd.SplitFiles.in_folder(tmp_path / "local", "val")[2:], (1.0, 10.0), strict=True):
        rows = read_reward_cache(path, DIALOGUES)
        assert {len(row) for row in rows} == {11}
        assert all(0 <= row[0] <= start for row in rows)


def test_answers_and_rewards_of_trained_models_are_the_same_behind_http(home, local):
    pytest.importorskip("uvicorn")
    files = vd.SplitFiles.in_folder(home / "data", "val", npy=True)
    data = vd.VisualDialogues(files.dialogues, files.features, "val")
    questions = [each.rounds[row % 10].question for row, each in enumerate(data.dialogues)]
    dialogues = [each._replace(rounds=each.rounds[: row % 10]) for row, each in enumerate(data.dialogues)]
    with vd.DialogueServer(local) as server:
        remote = vd.RemoteModels(server.url)
        for measure in ("rank", "distance"):
            found = answer_and_score(remote, dialogues, questions, data.features.all(), measure=measure)
            assert found == answer_and_score(local, dialogues, questions, data.features.all(), measure=measure)


def test_an_interrupted_command_continues(home, tmp_path, capsys):
    assert rewards(home, tmp_path / "whole", "--models", str(home / "models")) == 0
    with interrupted_at(vd.LocalDialogueModels, "by_round", 2):
        assert rewards(home, tmp_path / "cut", "--models", str(home / "models")) == 130
    capsys.readouterr()
    assert rewards(home, tmp_path / "cut", "--models", str(home / "models")) == 0
    assert capsys.readouterr().out.splitlines()[0] == "10 of 12 dialogues"
    assert caches(tmp_path / "cut") == caches(tmp_path / "whole")


@pytest.mark.parametrize("given", [{}, {"server": "http://localhost:1", "models": "models"}])
def test_models_come_from_one_place(given):
    with pytest.raises(ValueError, match="Give either --server or --models"):
        VisualDialogueRewards(dialogues="d", features="f", split="val", out="o", **given)


def test_a_server_that_does_not_run(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torchrl_lang._http.time.sleep", lambda *wait: None)
    assert rewards(home, tmp_path, "--server", "http://127.0.0.1:1") == 2
    assert "http://127.0.0.1:1/health answered none of 13 requests" in capsys.readouterr().err


@pytest.mark.parametrize("items", [1, 1000])
def test_a_server_accepts_the_batches_that_it_offers(local, items):
    """Features of full batches fit into its limit of bytes."""
    body = {"route": "percentile", "img_features": [[-0.12345678901234567e-10] * local.feature_size] * 100}
    assert vd.DialogueServer(local, items=items).limits["body"] >= items / 100 * len(json.dumps(body))


@pytest.mark.parametrize("host", ["", "\xe9..x"])
def test_a_host_that_cannot_be_used_is_an_error_of_one_line(home, host, capsys):
    files = vd.SplitFiles.in_folder(home / "data", "val", npy=True)
    given = ["--models", str(home / "models"), "--features", str(files.features), "--host", host]
    assert main(["serve", "visual_dialogue", *given]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_one_process_at_a_time_computes_rewards(home, tmp_path, capsys):
    """Two would append to one file."""
    with folder_lock(tmp_path, "computes rewards"):
        assert rewards(home, tmp_path, "--models", str(home / "models")) == 2
    assert "Another process computes rewards in" in capsys.readouterr().err
