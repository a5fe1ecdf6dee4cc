"""What the offline recipes share: held-out episodes, reports on values, averages of weights, starts, choice of beta."""

import json
from dataclasses import replace

import pytest
import torch

from tests.recipes.commands import refused
from tests.recipes.walks import TINY, train
from torchrl_lang.__main__ import main
from torchrl_lang.data import best_rows, load_dataset, row_buffer
from torchrl_lang.evaluation import imitation_loss, value_report
from torchrl_lang.evaluation.plots import read_columns
from torchrl_lang.modules import language_actor
from torchrl_lang.modules.frozen import lower_layers
from torchrl_lang.modules.frozen.lower_layers import StatesOfRows
from torchrl_lang.recipes import algorithms, offline
from torchrl_lang.recipes import runs as training_loop
from torchrl_lang.recipes.algorithms import BC, ILQL
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.offline import held_out_rows
from torchrl_lang.schema import FROZEN_STATES

FROZEN = ["--lr", "1e-12", "--weight-decay", "0"]


@pytest.mark.parametrize(("held_out", "number"), [(5, 5), (500, 12), (0, 0)])
def test_the_last_episodes_are_held_out_at_most_a_tenth(walks, held_out, number):
    dataset = load_dataset(walks / "data")
    rows = held_out_rows(dataset, held_out)
    assert len(rows) == number
    assert torch.equal(rows["tokens"], dataset[120 - number :]["tokens"])


def test_held_out_episodes_are_not_trained_on(walks, monkeypatch):
    """The rows that reach the replay buffer end before the held-out ones."""
    trained = []
    monkeypatch.setattr(
        "torchrl_lang.recipes.offline.row_buffer",
        lambda rows, *args, **options: trained.append(rows) or row_buffer(rows, *args, **options),
    )
    for name, fraction in (("of-all", 1), ("of-best", 0.5)):
        assert train(walks, "bc", name, "--fraction", fraction, "--steps", 1) == 0
    assert [len(rows) for rows in trained] == [108, 54]
    data = load_dataset(walks / "data")
    assert torch.equal(trained[0]["tokens"].long(), data[:108]["tokens"])
    for name, learned in (("of-all", data[108:]), ("of-best", best_rows(data[108:], fraction=0.5))):
        logged = read_columns(walks / name / "log.csv")["held_out_loss"][-1]
        actor = language_actor(load_run(walks / name).model.lm)
        assert imitation_loss(actor, learned) == pytest.approx(logged, rel=1e-4)


def test_layers_that_do_not_train_are_computed_once_for_a_dataset_or_a_batch(walks, monkeypatch):
    carrying, made = offline.with_frozen_states, []

    def recorded(*args, **options):
        rows = carrying(*args, **options)
        made.append(len(rows) if FROZEN_STATES in rows.keys() else 0)
        return rows

    def losses(name, steps):
        own = ("--layers", 2, "--top-layers", 1, "--steps", steps, "--log-every", 1, "--held-out", 0)
        assert train(walks, "bc", name, *own) == 0
        return read_columns(walks / name / "log.csv")["loss"]

    with monkeypatch.context() as patch:
        patch.setattr(offline, "with_frozen_states", lambda loss, rows, **_: rows)
        never = losses("never", 8)
    monkeypatch.setattr(offline, "with_frozen_states", recorded)
    assert losses("once", 8) == pytest.approx(never, rel=1e-4)
    monkeypatch.setattr(offline, "_FROZEN_STATES", 0)
    assert losses("each", 8) == pytest.approx(never, rel=1e-4)
    assert made == [120, 0, *7 * [16], 8]
    monkeypatch.setattr(offline, "_FROZEN_STATES", 2**30)
    losses("short", 7)  # reads 112 of the 120 rows
    assert made[10:] == 7 * [16]


def test_the_values_of_held_out_episodes_are_reported(walks):
    dataset, task = open_dataset(walks / "data")
    rows, run = dataset[108:], load_run(walks / "ilql")
    values, known = (run.model.heads["target_qvalue"], run.model.heads["value"]), task.known_values(rows)
    report = value_report(language_actor(run.model.lm), *values, rows, run.tokenizer.control, known=known)
    saved = json.loads((walks / "ilql" / "values.json").read_text())
    assert saved["qvalue_bias"] == pytest.approx(report.qvalue_bias, rel=1e-4)
    assert saved["rank_accuracy"] == pytest.approx(report.rank_accuracy, abs=1e-4)
    logged = read_columns(walks / "ilql" / "log.csv")["rank_accuracy"]
    assert report.rank_accuracy in [pytest.approx(value, abs=1e-4) for value in logged]
    assert saved["summary"] == str(report) == run.values_note
    assert not saved["ready"]  # four steps


def test_without_held_out_episodes_there_is_no_value_report(walks):
    assert train(walks, "ilql", "all", "--held-out", 0, "--steps", 2) == 0
    assert not (walks / "all" / "values.json").exists()
    assert "held_out_loss" not in read_columns(walks / "all" / "log.csv")


def test_ilql_starts_from_the_weights_of_bc(walks):
    assert train(walks, "ilql", "frozen", "--start", "bc", "--steps", 2, *FROZEN) == 0
    bc, ilql = (load_run(walks / name).model.lm.state_dict() for name in ("bc", "frozen"))
    for name, weight in bc.items():
        torch.testing.assert_close(ilql[name], weight, rtol=0, atol=1e-6)


def test_a_start_needs_the_same_tokens_and_no_pretrained_model(walks, wordle, tmp_path, capsys):
    common = ["--data", wordle / "data", "--out", tmp_path / "run", *TINY]
    for recipe, option in (("bc", "--start"), ("psi", "--prior")):
        assert "has other tokens than the data" in refused(capsys, "train", recipe, *common, option, walks / "bc")
    both = ["--start", walks / "bc", "--pretrained", "gpt2"]
    assert "Give one of --start" in refused(capsys, "train", "bc", *common, *both)
    assert "There is no run" in refused(capsys, "train", "bc", *common, "--start", tmp_path / "nothing")


def players_of(run):
    """The players of a run's last evaluation."""
    last = max(run.glob("evaluation*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [player["name"] for player in json.loads(last.read_text())["players"]]


def test_beta_auto_is_the_best_on_other_games_and_stands_in_the_table(walks, capsys):
    found = load_run(walks / "ilql").choose_beta(seed=5, games=16, betas=(8.0, 1.0))
    assert set(found) == {1.0, 8.0}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    more = ["--method", "best_of", "--candidates", "2", "--games", "8"]
    assert main(["evaluate", "--run", str(walks / "ilql"), "--beta", "0", "auto", *more]) == 0
    text = capsys.readouterr().out
    line = next(line for line in text.splitlines() if line.startswith("ilql: mean return by beta on other games: "))
    best = line.removeprefix("ilql: mean return by beta on other games: ").split(":")[0]
    assert players_of(walks / "ilql")[-2:] == ["ilql best_of", f"ilql beta {best} best_of"]
    assert load_run(walks / "ilql").values_note in text


def test_of_equal_betas_the_smaller_one_is_chosen(walks, monkeypatch):
    run = load_run(walks / "ilql")
    same = run.task.evaluate(run.policy(1.0, method="greedy"), games=4, seed=0)
    monkeypatch.setattr(type(run.task), "evaluate", lambda *args, **options: same)
    assert next(iter(run.choose_beta(seed=0, betas=(4.0, 2.0, 16.0)))) == 2.0


def test_runs_without_values_cannot_choose_beta(walks, capsys):
    assert main(["evaluate", "--run", str(walks / "bc"), "--beta", "auto", "--games", "8"]) == 0  # without values
    assert {"bc sample", "bc greedy"} <= set(players_of(walks / "bc"))
    assert load_run(walks / "bc").choose_beta(seed=0) == {}
    error = refused(capsys, "evaluate", "--run", walks / "ilql", "--beta", "often")
    assert "--beta should be a valid number or 'auto', got often" in error


def position_weights(folder):
    return load_run(folder).model.lm.transformer.wpe.weight.detach()


def test_the_saved_model_is_the_average_of_the_steps(walks, monkeypatch):
    """Computed from the language model's weights after each step of a run without an average."""
    steps, original = [], training_loop.train_steps

    def recorded(loss, *args, **options):
        for step in original(loss, *args, **options):
            weights = getattr(loss, "actor_network_params", loss).named_parameters()
            steps.append(next(w.detach().clone() for name, w in weights if "wpe" in name))
            yield step

    monkeypatch.setattr(training_loop, "train_steps", recorded)
    options = ["--steps", 6, "--eval-every", 6, "--lr", 0.02]
    assert train(walks, "bc", "plain", *options) == 0
    torch.testing.assert_close(position_weights(walks / "plain"), steps[-1])
    assert train(walks, "bc", "begin", "--steps", 1, *FROZEN) == 0
    expected = position_weights(walks / "begin")
    for n, weight in enumerate(steps[:6], start=1):
        decay = min(0.3, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * weight
    assert train(walks, "bc", "averaged", *options, "--ema-decay", 0.3) == 0
    torch.testing.assert_close(position_weights(walks / "averaged"), expected)
    assert not torch.allclose(expected, steps[5], atol=1e-4)
    actor = language_actor(load_run(walks / "averaged").model.lm)
    logged = read_columns(walks / "averaged" / "log.csv")["held_out_loss"][-1]
    assert imitation_loss(actor, load_dataset(walks / "data")[108:]) == pytest.approx(logged, rel=1e-4)


def test_states_that_one_training_hands_on_to_the_next_change_no_weight(walks, tmp_path, monkeypatch):
    computed, real = [], lower_layers.with_frozen_states
    monkeypatch.setattr(
        lower_layers, "with_frozen_states", lambda *args, **limit: computed.append(args) or real(*args, **limit)
    )

    def trained(name, states):
        home, models = tmp_path / name, []
        sizes = {"layers": 2, "top_layers": 1, "width": 16, "heads": 2, "batch_size": 16, "steps": 8, "eval_games": 2}
        for kind, start in ((BC, None), (ILQL, home / "bc")):
            options = kind(data=walks / "data", out=home / kind.algorithm, start=start, **sizes)
            algorithms.train(options, data=replace(offline.open_data(options), states=states))
            models.append(load_run(options.out).model)
        return [each.state_dict() for model in models for each in (model.lm, *model.heads.values())]

    apart, handed = trained("apart", None), trained("handed", StatesOfRows())
    assert len(computed) == 1
    assert len(apart) == len(handed) > 2
    for one, other in zip(apart, handed, strict=True):
        for name, weight in one.items():
            assert torch.equal(other[name], weight)
