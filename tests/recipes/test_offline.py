"""What the offline recipes do beside training: held-out episodes, reports on values, starting from a run, beta auto."""

from __future__ import annotations

import json

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang.data import row_buffer
from torchrl_lang.evaluation import imitation_loss, read_columns, value_report
from torchrl_lang.modules import language_actor
from torchrl_lang.recipes.algorithms import BC
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.offline import held_out_rows

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A dataset of 120 walks, BC on it, and ILQL that starts from BC with a vanishing learning rate."""
    folder = tmp_path_factory.mktemp("offline")
    data = ["--data", str(folder / "data")]
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(folder / "data"), *graph]) == 0
    assert main(["train", "bc", *data, "--out", str(folder / "bc"), *TINY]) == 0
    start = ["--start", str(folder / "bc"), "--lr", "1e-12", "--weight-decay", "0"]
    assert main(["train", "ilql", *data, "--out", str(folder / "ilql"), *TINY, *start]) == 0
    return folder


def options_of(runs, **more):
    return BC(data=runs / "data", out=runs / "other", **more)


@pytest.mark.parametrize(("held_out", "number"), [(5, 5), (500, 12), (0, 0)])
def test_the_last_episodes_are_held_out_at_most_a_tenth(runs, held_out, number):
    dataset, _ = open_dataset(runs / "data")
    rows = held_out_rows(dataset, held_out)
    assert len(rows) == number
    assert torch.equal(rows["tokens"], dataset[120 - number :]["tokens"])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_held_out_episodes_are_not_trained_on(runs, monkeypatch, fraction):
    """The rows that reach the replay buffer end before the held-out ones."""
    trained = []
    monkeypatch.setattr(
        "torchrl_lang.recipes.offline.row_buffer",
        lambda rows, *args, **options: trained.append(rows) or row_buffer(rows, *args, **options),
    )
    more = ["--fraction", str(fraction)]
    assert main(["train", "bc", "--data", str(runs / "data"), "--out", str(runs / f"bc{fraction}"), *TINY, *more]) == 0
    dataset, _ = open_dataset(runs / "data")
    assert len(trained[0]) == int(108 * fraction)
    if fraction == 1:
        assert torch.equal(trained[0]["tokens"].long(), dataset[:108]["tokens"])


def test_the_log_has_the_loss_and_the_values_of_held_out_episodes(runs):
    dataset, task = open_dataset(runs / "data")
    rows = dataset[108:]
    for name in ("bc", "ilql"):
        logged = read_columns(runs / name / "log.csv")["held_out_loss"][-1]
        assert logged == pytest.approx(imitation_loss(language_actor(load_run(runs / name).model.lm), rows), rel=1e-4)
    run = load_run(runs / "ilql")
    heads = run.model.heads
    values, known = (heads["target_qvalue"], heads["value"]), task.known_values(rows)
    report = value_report(language_actor(run.model.lm), *values, rows, run.tokenizer.control, known=known)
    saved = json.loads((runs / "ilql" / "values.json").read_text())
    assert saved["qvalue_bias"] == pytest.approx(report.qvalue_bias, rel=1e-4)
    assert saved["rank_accuracy"] == pytest.approx(report.rank_accuracy, abs=1e-4)
    assert read_columns(runs / "ilql" / "log.csv")["rank_accuracy"][-1] == pytest.approx(report.rank_accuracy, abs=1e-4)
    assert saved["summary"] == str(report) == run.values_note
    assert not saved["ready"]  # three steps


@pytest.mark.parametrize("task", ["wordle", "random_walks"])
def test_without_held_out_episodes_there_is_no_value_report(task, tmp_path):
    assert main(["generate", task, "--games", "20", "--out", str(tmp_path / "data")]) == 0
    options = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--held-out", "0"]
    assert main(["train", "ilql", *options, *TINY]) == 0
    assert not (tmp_path / "run" / "values.json").exists()
    assert "held_out_loss" not in read_columns(tmp_path / "run" / "log.csv")


def test_ilql_starts_from_the_weights_of_bc(runs):
    bc, ilql = (load_run(runs / name).model.lm.state_dict() for name in ("bc", "ilql"))
    for name, weight in bc.items():
        torch.testing.assert_close(ilql[name], weight, rtol=0, atol=1e-6)


def test_a_start_needs_the_same_tokens_and_no_pretrained_model(runs, tmp_path, capsys):
    assert main(["generate", "wordle", "--words", "10", "--games", "20", "--out", str(tmp_path / "wordle")]) == 0
    common = ["train", "bc", "--data", str(tmp_path / "wordle"), "--out", str(tmp_path / "run")]
    assert main([*common, "--start", str(runs / "bc"), *TINY]) == 2
    assert "is about random_walks, which has other tokens than the data" in capsys.readouterr().err
    assert main([*common, "--start", str(runs / "bc"), "--pretrained", "gpt2"]) == 2
    assert "Give one of --start" in capsys.readouterr().err
    assert main([*common, "--start", str(tmp_path / "nothing"), *TINY]) == 2
    assert "There is no run" in capsys.readouterr().err


def players_of(run):
    """The players of a run's last evaluation."""
    last = max(run.glob("evaluation*.json"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(last.read_text())["players"]


def test_beta_auto_is_the_best_on_other_games_and_stands_in_the_table(runs, capsys):
    found = load_run(runs / "ilql").choose_beta(seed=5, games=16, betas=(8.0, 1.0))
    assert set(found) == {1.0, 8.0}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert main(["evaluate", "--run", str(runs / "ilql"), "--beta", "0", "auto", "--games", "16"]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("ilql: mean return by beta on other games: "))
    best = line.removeprefix("ilql: mean return by beta on other games: ").split(":")[0]
    names = [player["name"] for player in players_of(runs / "ilql")]
    assert f"ilql beta {best} greedy" in names
    assert load_run(runs / "ilql").values_note in text


def test_best_of_plays_by_the_value_of_the_utterance_where_there_are_values(runs):
    bc, ilql = (load_run(runs / name).policy(method="best_of", candidates=2) for name in ("bc", "ilql"))
    assert (bc.decoder.end_value_weight, bc.decoder.log_prob_weight) == (0.0, 1.0)
    assert (ilql.decoder.end_value_weight, ilql.decoder.log_prob_weight) == (1.0, 0.0)
    command = ["evaluate", "--run", str(runs / "ilql"), "--beta", "0", "2", "--method", "best_of", "--candidates", "2"]
    assert main([*command, "--games", "16"]) == 0
    names = [player["name"] for player in players_of(runs / "ilql")]
    assert names[-2:] == ["ilql best_of", "ilql beta 2 best_of"]


def test_of_equal_betas_the_smaller_one_is_chosen(runs, monkeypatch):
    run = load_run(runs / "ilql")
    same = run.task.evaluate(run.policy(1.0, method="greedy"), games=4, seed=0)
    monkeypatch.setattr(type(run.task), "evaluate", lambda *args, **options: same)
    assert next(iter(run.choose_beta(seed=0, betas=(4.0, 2.0, 16.0)))) == 2.0


def test_runs_without_values_cannot_choose_beta(runs, capsys):
    assert main(["evaluate", "--run", str(runs / "bc"), "--beta", "auto", "--games", "8"]) == 0  # plays without values
    names = [player["name"] for player in players_of(runs / "bc")]
    assert {"bc sample", "bc greedy"} <= set(names)
    with pytest.raises(ValueError, match="learned no values"):
        load_run(runs / "bc").choose_beta(seed=0)
    assert main(["evaluate", "--run", str(runs / "ilql"), "--beta", "often"]) == 2
    assert "--beta should be a valid number or 'auto', got often" in capsys.readouterr().err
