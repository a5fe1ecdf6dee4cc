"""The visual dialogue demo: nothing is done twice, choices are made on other scenes, and the figures are right."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from tests.envs.visual_dialogue.real_files import write_hdf5
from tests.recipes.commands import Trainings, recorded_evaluations, words_of
from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset
from torchrl_lang.envs.visual_dialogue import DialogueRewards
from torchrl_lang.envs.visual_dialogue import prepare as prepare_visual_dialogue
from torchrl_lang.envs.visual_dialogue.prepare import PreparedFolder
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.recipes import visual_dialogue_demo
from torchrl_lang.recipes.compare import CHOICE, REPORT
from torchrl_lang.recipes.visual_dialogue_demo import VisualDialogueDemo
from torchrl_lang.text.tokenizer_files import transformers_tokenizer

SMALL = {"steps": 2, "layers": 1, "width": 16, "batch-size": 8, "choice-games": 6, "eval-games": 13}


def command(home, out, *more, methods=("bc", "ilql"), rewards=("none", "hard")):
    names = ["--methods", *methods, "--rewards", *rewards, *words_of(SMALL)]
    return main(["visual_dialogue", "--out", str(out), "--folder", str(home), "--no-image", *names, *more])


@pytest.fixture(scope="module", autouse=True)
def _few_decodings():
    few = partial(visual_dialogue_demo.compare.decodings, temperatures=(0.5,), betas=(4.0,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visual_dialogue_demo.compare, "decodings", few)
        yield


@pytest.fixture
def evaluations(monkeypatch):
    """The games that were played, outside of trainings."""
    return recorded_evaluations(VisualDialogueTask, monkeypatch)


@pytest.fixture(scope="module")
def first_call(prepared_dialogues, tmp_path_factory):
    """A demo from end to end, and the games that were played outside of trainings; tests must not write into it."""
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        Trainings().take_over(patch)
        calls = recorded_evaluations(VisualDialogueTask, patch)
        assert command(prepared_dialogues, out) == 0
    return out, calls


@pytest.fixture
def finished(first_call):
    return first_call[0]


def results_of(out):
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_all_that_is_promised_is_there(first_call):
    out, evaluations = first_call
    results, report = results_of(out), (out / "report.txt").read_text()
    assert {path.name for path in (out / "seed-0").iterdir()} == {"bc", "ilql-none", "ilql-hard"}
    for penalty in ("none", "hard"):
        assert f"Reward {penalty!r}" in report
        players = results[penalty]
        assert set(players) == {"BC", "ILQL", "dialogues of the data", "random questions"}
        for title, player in players.items():
            assert title in report
            assert player["games"] == 13
            assert {"rounds", "percentile", "yes_no_soft", "yes_no_hard", "yes_no_conservative"} == {*player["metrics"]}
        for title, name in (("BC", "bc"), ("ILQL", f"ilql-{penalty}")):
            choice = json.loads((out / "seed-0" / name / f"figures-{penalty}" / "choice.json").read_text())["summaries"]
            returns = {way: found["mean_return"] for way, found in choice.items()}
            (chosen,) = players[title]["decodings"]
            assert returns[chosen] == max(returns.values())
    # Decodings are chosen on other scenes than those of the report.
    assert {(split, seed) for split, seed, _ in evaluations} == {CHOICE, REPORT}
    assert [games for split, _, games in evaluations if split == "val"] == [6] * 2 * (2 + 1)
    assert [games for split, _, games in evaluations if split == "test"] == [13] * 2 * 3


@pytest.mark.slow
def test_dialogues_of_the_data_by_a_plain_loop(prepared_dialogues, finished):
    items = json.loads((prepared_dialogues / "data" / "visdial_0.5_test.json").read_text())[:13]
    caches = json.loads((prepared_dialogues / "test_rank_reward_cache1.json").read_text())[:13]
    returns, last = [], []
    for item, (initial, *changes) in zip(items, caches, strict=True):
        end = next(end for end in range(1, 11) if DialogueRewards().is_last(initial, changes[:end]))
        hard = sum(each["answer"] in ("yes", "no") for each in item["dialog"][:end])
        returns.append(1.0 - end - 2.0 * hard)
        last.append(initial + sum(changes[:end]))
    found = results_of(finished)["hard"]["dialogues of the data"]
    assert found["mean_return"] == pytest.approx(np.mean(returns))
    assert found["return_error"] == pytest.approx(np.std(returns, ddof=1) / 13**0.5)
    assert found["metrics"]["percentile"] == pytest.approx(np.mean(last), abs=1e-6)


@pytest.mark.slow
def test_further_methods_and_rewards_use_what_is_there(prepared_dialogues, copied, trainings, evaluations):
    assert command(prepared_dialogues, copied) == 0
    assert (trainings.done, evaluations) == ([], [])
    assert command(prepared_dialogues, copied, methods=("chai",), rewards=("conservative",)) == 0
    assert trainings.done == ["chai-conservative"]  # it starts from BC's run
    assert [split for split, *_ in evaluations if split == "val"] == ["val"] * 3  # as many numbers of candidates
    assert "CHAI" in results_of(copied)["conservative"]
    assert main(["visual_dialogue", "--out", str(copied), "--folder", str(prepared_dialogues), "--steps", "3"]) == 2


@pytest.mark.slow
def test_prepare_takes_files_with_features_in_hdf5_and_a_tokenizer_of_hugging_face(prepared_dialogues, tmp_path):
    pytest.importorskip("h5py")
    given = PreparedFolder(str(prepared_dialogues))
    folder = shutil.copytree(prepared_dialogues / "data", tmp_path / "in")
    features = {split: np.load(folder / f"images_{split}.npy") for split in ("train", "val", "test")}
    write_hdf5(folder / "data_img.h5", **features)
    for path in folder.glob("*.npy"):
        path.unlink()
    transformers_tokenizer(given.tokens().tokenizer).save_pretrained(tmp_path / "tokenizer")
    more = ["--files", str(folder), "--tokenizer", str(tmp_path / "tokenizer"), "--width", "16"]
    epochs = ["--guesser-epochs", "1", "--answerer-epochs", "1"]
    assert main(["prepare", "visual_dialogue", "--out", str(tmp_path / "out"), *more, *epochs]) == 0
    found = PreparedFolder(str(tmp_path / "out"))
    assert not (tmp_path / "out" / "data").exists()  # the user's files stay where they are
    assert found.tokens().tokenizer.config()["kind"] == "huggingface"
    assert found.data("test").dialogues == given.data("test").dialogues
    assert torch.equal(found.data("test").features.all(), given.data("test").features.all())


def test_without_a_folder_one_is_prepared(tmp_path, monkeypatch):
    asked = []

    def prepare(options):
        asked.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_visual_dialogue, "main", prepare)
    assert main(["visual_dialogue", "--out", str(tmp_path / "out")]) == 130
    assert [options.out for options in asked] == [tmp_path / "out" / "prepared"]
    assert VisualDialogueDemo().folder is None


def test_runs_of_one_seed(prepared_dialogues, tmp_path, monkeypatch):
    found = []

    def stop(runs):
        found.extend(runs)
        raise KeyboardInterrupt

    monkeypatch.setattr(visual_dialogue_demo.compare, "train_missing", stop)
    assert command(prepared_dialogues, tmp_path, "--seeds", "2", methods=("ilql", "chai"), rewards=("hard",)) == 130
    assert [str(run.out.relative_to(tmp_path)) for run in found] == [
        f"seed-{seed}/{name}" for seed in (0, 1) for name in ("ilql-hard", "chai-hard", "bc")
    ]
    assert [run.options["data"].name for run in found] == ["hard", "hard", "none"] * 2
    assert found[1].options["start"] == found[2].out
    assert [run.options["seed"] for run in found] == [0] * 3 + [1] * 3
    images = [load_dataset(tmp_path / "data" / name).rows.get("features", None) for name in ("hard", "none")]
    assert images == [None, None]
