"""The visual dialogue demo: nothing is done twice, choices are made on other scenes, and the figures are right."""

from __future__ import annotations

import importlib
import json
import math
import shutil

import numpy as np
import pytest
import torch

from tests.envs.visual_dialogue.real_files import write_hdf5
from tests.recipes.demos import recorded_evaluations, trained_in_this_process
from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset, row_returns
from torchrl_lang.envs.visual_dialogue import prepare as prepare_visual_dialogue
from torchrl_lang.envs.visual_dialogue.dialogue import Round
from torchrl_lang.envs.visual_dialogue.prepare import PreparedFolder
from torchrl_lang.envs.visual_dialogue.task import VisualDialogueTask
from torchrl_lang.recipes.compare import CHOICE, REPORT
from torchrl_lang.recipes.visual_dialogue_demo import (
    UNGUIDED,
    Comparison,
    PlayedDialogues,
    Row,
    VisualDialogueDemo,
    beside_imitations,
    cross_rewards,
    format_comparison,
    format_cross_rewards,
    play,
)
from torchrl_lang.text.tokenizer_files import transformers_tokenizer

SMALL = {"steps": 2, "layers": 1, "width": 16, "batch-size": 8, "choice-games": 6, "eval-games": 13}
RUNS = {"bc", "ilql-none", "ilql-hard"}


def command(home, out, *more, methods=("bc", "ilql"), rewards=("none", "hard")):
    sizes = [str(word) for name, value in SMALL.items() for word in (f"--{name}", value)]
    names = ["--methods", *methods, "--rewards", *rewards]
    return main(["visual_dialogue", "--out", str(out), "--folder", str(home), "--no-image", *names, *sizes, *more])


@pytest.fixture
def evaluations(monkeypatch):
    """The games that were played, outside of trainings."""
    return recorded_evaluations(VisualDialogueTask, monkeypatch)


@pytest.fixture(scope="module")
def first_call(prepared_dialogues, tmp_path_factory):
    """A demo from end to end, and the games that were played outside of trainings; tests must not write into it."""
    out = tmp_path_factory.mktemp("demo") / "out"
    with trained_in_this_process(), pytest.MonkeyPatch.context() as patch:
        calls = recorded_evaluations(VisualDialogueTask, patch)
        assert command(prepared_dialogues, out) == 0
    return out, calls


@pytest.fixture
def finished(first_call):
    return first_call[0]


@pytest.fixture(scope="module")
def task(prepared_dialogues):
    return VisualDialogueTask(str(prepared_dialogues))


def results_of(out):
    """All figures, without what differs between two calls."""
    results = json.loads((out / "results.json").read_text())
    assert results.pop("minutes_of_this_call") >= 0
    assert results.pop("options")["steps"] == 2
    return results


# -- from end to end ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_that_is_promised_is_there(finished):
    results, report = results_of(finished), (finished / "report.txt").read_text()
    titles = {"BC", "ILQL", "ILQL beta 0", "dialogues of the data", "random questions"}
    for penalty in ("none", "hard"):
        players = results[penalty]["players"]
        assert set(players) == titles
        for player in players.values():
            assert player["games"] == 13
            assert player["return_error"] >= 0
            assert {"rounds", "percentile", "yes_no_soft", "yes_no_hard", "yes_no_conservative"} == set(
                player["metrics"]
            )
            assert len(player["percentile_by_round"]) == 11
        curve = results[penalty]["return_by_beta_on_validation_scenes"]["ILQL"]
        assert list(curve) == ["0", "1", "2", "4", "8", "16"]
        assert set(results[penalty]["advantages"]) == {"highest", "lowest"}
        assert f"Reward {penalty!r}, 13 dialogues" in report
        captions = (finished / "transcripts" / f"{penalty}.txt").read_text().split("scene ")[1:]
        assert len(captions) == 5
        assert all("\nBC, " in scene and "\nILQL, " in scene for scene in captions)
    assert len(results["checks"]) == 2
    assert results["checks"][1]["yes_no"] is not None
    assert "hard: ILQL asks " in report
    assert (finished / "pictures.png").stat().st_size > 10_000
    assert {path.name for path in (finished / "seed-0").iterdir()} == RUNS


@pytest.mark.slow
def test_further_methods_and_rewards_use_what_is_there(prepared_dialogues, copied, trainings, evaluations):
    assert command(prepared_dialogues, copied, methods=("bc", "chai"), rewards=("conservative",)) == 0
    assert trainings.done == ["chai-conservative"]  # it starts from BC's run
    assert sorted(split for split, *_ in evaluations if split == "val") == ["val"] * 3  # three numbers of candidates
    assert "CHAI" in results_of(copied)["conservative"]["players"]
    assert main(["visual_dialogue", "--out", str(copied), "--folder", str(prepared_dialogues), "--steps", "3"]) == 2


@pytest.mark.slow
def test_decodings_are_chosen_on_other_scenes_than_those_of_the_report(first_call):
    out, evaluations = first_call
    assert {(split, seed) for split, seed, _ in evaluations} == {CHOICE, REPORT}
    assert {games for split, _, games in evaluations if split == "val"} == {6}
    assert len([1 for split, *_ in evaluations if split == "val"]) == 4 + 6 * 2
    played = [1 for split, *_ in evaluations if split == "test"]
    assert len(played) == 1 + len(list((out / "seed-0").glob("*/test/*.json")))  # each once, and the random player
    results = results_of(out)
    for penalty in ("none", "hard"):
        for title, name in (("BC", "bc"), ("ILQL", f"ilql-{penalty}")):
            choice = json.loads((out / "seed-0" / name / "choice.json").read_text())
            allowed = {way: found[penalty] for way, found in choice.items() if way != UNGUIDED}
            (chosen,) = results[penalty]["players"][title]["decodings"]
            assert allowed[chosen] == max(allowed.values())


# -- figures ----------------------------------------------------------------------------------------------------------

YES_NO = {
    "none": lambda answer: False,
    "hard": lambda answer: answer in ("yes", "no"),
    "conservative": lambda answer: any(part in answer for part in ("not", "n't", "yes", "no", "think so")),
}
"""The definitions, as far as the generated answers need them."""


@pytest.mark.slow
def test_the_cross_reward_table_by_a_plain_loop(finished):
    results = results_of(finished)["cross_rewards"]
    for trained in ("none", "hard"):
        for title, run in (("BC", "bc"), ("ILQL", f"ilql-{trained}")):
            (way,) = results_of(finished)[trained]["players"][title]["decodings"]
            name = way.replace(",", "").replace(" ", "_")
            played = json.loads((finished / "seed-0" / run / "test" / f"{name}.json").read_text())
            for penalty in ("none", "hard"):
                returns = []
                for rounds in played["rounds"]:
                    total = 1.0 - len(rounds)
                    for _, answer in rounds:
                        total -= 2.0 * bool(YES_NO[penalty](answer))
                    returns.append(total)
                mean = sum(returns) / 13
                error = math.sqrt(sum((each - mean) ** 2 for each in returns) / 12 / 13)
                assert results[title][trained][penalty] == pytest.approx([mean, error])


@pytest.mark.slow
@pytest.mark.parametrize("penalty", ["none", "soft", "hard", "conservative"])
def test_returns_and_figures_are_those_of_the_environment(task, tmp_path, penalty):
    own = VisualDialogueTask(task.folder, penalty=penalty, image=False)
    policy = task.player("data", 0).policy
    summary, records = own.evaluate(policy, split="test", games=13, seed=5)
    play(task, policy, 13, 5, ("test", 0)).write(tmp_path / "played.json")  # under the reward "none"
    played = PlayedDialogues.read(tmp_path / "played.json", remedy="")
    assert torch.equal(played.returns(penalty), records.returns)
    found = played.summary(summary.name, task, penalty)
    for name in ("games", "mean_return", "return_error", "win_rate", "mean_turns", "metrics"):
        assert getattr(found, name) == getattr(summary, name)


@pytest.mark.parametrize("penalty", ["none", "hard"])
def test_dialogues_of_the_data_are_those_of_its_rows(task, prepared_dialogues, tmp_path, penalty):
    words = ["--folder", str(prepared_dialogues), "--out", str(tmp_path / "data"), "--penalty", penalty, "--no-image"]
    assert main(["generate", "visual_dialogue", *words]) == 0
    data = PlayedDialogues.of_dataset(task, "train", 48)
    assert torch.equal(data.returns(penalty), row_returns(load_dataset(tmp_path / "data")[:]).float())
    assert len(PlayedDialogues.of_dataset(task, "train", 7).rounds) == 7


def made(*dialogues):
    """Dialogues of answers; each gains an eighth in every round from 0.5 on."""
    rounds = tuple(tuple(Round("is it?", answer) for answer in answers) for answers in dialogues)
    progress = tuple((0.5, *[0.125] * len(each), *[0.0] * (10 - len(each))) for each in dialogues)
    return PlayedDialogues(rounds=rounds, progress=progress, terminated=(True,) * len(dialogues))


BC = made(["yes", "red", "no"], ["red", "no"])  # none: -2 -1; hard: -6 -3
ILQL = made(["red"], ["red", "blue"])  # none and hard: 0 -1
OTHER = made(["no"], ["no"])  # none: 0 0; hard: -2 -2


def compared(penalty):
    rows = [Row("BC", [BC], ["greedy"], imitates=True), Row("ILQL", [ILQL], ["greedy, beta 1"])]
    rows = {row.title: row for row in [*rows, Row("other", [OTHER], imitates=True)]}
    return Comparison(penalty, rows, {"ILQL": {"0": [-2.0], "1": [-1.0]}})


def test_checks_worked_out_by_hand(task):
    (none, _), (hard, text) = (beside_imitations(compared(penalty), task) for penalty in ("none", "hard"))
    assert (none["imitation"], none["mean_return"], none["imitation_return"]) == ("other", -0.5, 0.0)
    assert not none["beats"]
    # -0.5 ± 0.5 is beside BC's -4.5 ± 1.5 ahead by 4 - 2 sqrt(2.5) = 0.84, beside the other's -2 ± 0 by 1.5 - 1 = 0.5.
    assert (hard["imitation"], hard["two_errors"], hard["beats"]) == ("other", 1.0, True)
    assert (hard["yes_no"], hard["yes_no_of_bc"], hard["yes_no_ratio"]) == (0.0, 1.5, 0.0)
    assert hard["percentile_gain"] == pytest.approx(1.5 / 8 - 2.5 / 8)
    assert hard["percentile_error"] == pytest.approx(math.hypot(0.0625, 0.0625))
    assert "beats every imitation" in text
    assert "a ratio of 0.00. Its final percentile minus BC's is -0.125 ± 0.088." in text
    assert beside_imitations(Comparison("none", {"BC": compared("none").rows["BC"]}, {}), task) is None


def test_tables_of_several_seeds(task):
    bc = Row("BC", [BC, OTHER], ["greedy", "sampled at 1"])
    rows = {"BC": bc, "ILQL": Row("ILQL", [ILQL, ILQL], ["greedy"] * 2)}
    hard = Comparison("hard", rows, {"ILQL": {"0": [-2.0, -1.0], "1": [-1.0, 0.0]}})
    summary = bc.summary(task, "hard")
    assert (summary.name, summary.games) == ("BC", 4)  # the seeds have different decodings
    assert summary.mean_return == pytest.approx((-6 - 3 - 2 - 2) / 4)
    assert summary.return_error == pytest.approx(1.25)  # of -4.5 and -2
    text = format_comparison(hard, task)
    assert "-4.50, -2.00" in text
    assert "ILQL, greedy" in text
    assert "ILQL, return by beta on validation scenes: 0: -1.50, 1: -0.50" in text
    figures = bc.as_dict(task, "hard")
    assert figures["returns_of_seeds"] == [-4.5, -2.0]
    assert figures["percentile_by_round"][:3] == pytest.approx([0.5, 0.625, (0.75 * 2 + 0.625 * 2) / 4])


def test_the_text_of_the_cross_reward_table(task):
    both = [compared("none"), compared("hard")]
    found = cross_rewards(both, task, "BC")["none"]
    assert found == {"none": pytest.approx((-1.5, 0.5)), "hard": pytest.approx((-4.5, 1.5))}
    lines = format_cross_rewards(both, task).splitlines()
    assert [line.split() for line in lines if line.startswith("ILQL")][1] == (
        ["ILQL", "hard", *["-0.50", "±", "0.50"] * 2]
    )
    assert not any(line.startswith("other") for line in lines)  # it was not trained


# -- options and files -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prepare_takes_files_with_features_in_hdf5_and_a_tokenizer_of_hugging_face(prepared_dialogues, tmp_path):
    pytest.importorskip("h5py")
    given, folder = (
        PreparedFolder(str(prepared_dialogues)),
        shutil.copytree(prepared_dialogues / "data", tmp_path / "in"),
    )
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


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    assert main(["visual_dialogue", "--out", str(tmp_path / "out"), "--folder", str(tmp_path / "mistyped")]) == 2
    assert "mistyped" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.json")), "the corrected command can use the folder"


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

    monkeypatch.setattr(importlib.import_module("torchrl_lang.recipes.visual_dialogue_demo"), "train_missing", stop)
    assert command(prepared_dialogues, tmp_path, "--seeds", "2", methods=("ilql", "chai"), rewards=("hard",)) == 130
    assert [str(run.out.relative_to(tmp_path)) for run in found] == [
        f"seed-{seed}/{name}" for seed in (0, 1) for name in ("ilql-hard", "chai-hard", "bc")
    ]
    assert [run.options["data"].name for run in found] == ["hard", "hard", "none"] * 2
    assert found[1].options["start"] == found[2].out
    assert [run.options["seed"] for run in found] == [0] * 3 + [1] * 3
    images = [load_dataset(tmp_path / "data" / name).rows.get("features", None) for name in ("hard", "none")]
    assert images == [None, None]
