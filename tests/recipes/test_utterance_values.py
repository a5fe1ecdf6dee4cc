"""Recipes with values of utterances: they train, resume, and save what their policy is built from."""

from __future__ import annotations

import shutil

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang.evaluation import read_columns
from torchrl_lang.modules import CHAIActor, UtteranceActor, UtteranceValueGuidance, language_actor
from torchrl_lang.recipes import utterance_values
from torchrl_lang.recipes.algorithms import CHAI
from torchrl_lang.recipes.load_run import load_run

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A dataset of 60 walks and BC on it."""
    folder = tmp_path_factory.mktemp("utterances")
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "60"]
    assert main(["generate", "random_walks", "--out", str(folder / "data"), *graph]) == 0
    assert main(["train", "bc", "--data", str(folder / "data"), "--out", str(folder / "bc"), *TINY]) == 0
    return folder


def train(runs, recipe, name, *more):
    return main(["train", recipe, "--data", str(runs / "data"), "--out", str(runs / name), *TINY, *more])


def test_utterance_ilql_saves_its_policy(runs):
    assert train(runs, "utterance-ilql", "whole", "--start", str(runs / "bc"), "--candidates", "4") == 0
    run = load_run(runs / "whole")
    heads = run.model.heads
    assert sorted(heads) == ["target_utterance_qvalue", "utterance_qvalue", "value"]
    assert not torch.equal(*(heads[name].out_weight for name in ("target_utterance_qvalue", "utterance_qvalue")))
    logged = read_columns(runs / "whole" / "log.csv")
    assert {"return", "held_out_loss", "loss_qvalue", "loss_value", "loss_actor"} <= set(logged)
    policy = UtteranceActor(
        language_actor(run.model.lm),
        run.tokenizer.control,
        run.action_length,
        guidance=UtteranceValueGuidance(heads["target_utterance_qvalue"]),
        method="best_of",
        candidates=4,
        end_value_weight=1.0,
        log_prob_weight=0.0,
    )
    found, _ = run.task.evaluate(policy, games=8, seed=1)
    assert logged["return"][-1] == pytest.approx(found.mean_return, abs=1e-4)


def test_chai_saves_its_policy_and_leaves_the_language_model_as_it_was(runs):
    options = ["--start", str(runs / "bc"), "--candidates", "4", "--proposals", "2"]
    assert train(runs, "chai", "chai", *options) == 0
    run = load_run(runs / "chai")
    assert sorted(run.model.heads) == ["chai_qvalue", "target_chai_qvalue"]
    started = load_run(runs / "bc").model.lm.state_dict()
    for name, weight in run.model.lm.state_dict().items():
        torch.testing.assert_close(weight, started[name], rtol=0, atol=0)
    logged = read_columns(runs / "chai" / "log.csv")
    assert {"return", "held_out_value_loss", "loss_qvalue", "loss_cql", "candidate_value"} <= set(logged)
    sampling = UtteranceActor(language_actor(run.model.lm), run.tokenizer.control, run.action_length)
    policy = CHAIActor(sampling, run.model.heads["target_chai_qvalue"], candidates=4)
    found, _ = run.task.evaluate(policy, games=8, seed=1)
    assert logged["return"][-1] == pytest.approx(found.mean_return, abs=1e-4)


def seen_by_training(runs, recipe, monkeypatch, *more):
    """The loss, the policy and the further parts with which a recipe would train."""
    seen = []
    monkeypatch.setattr(
        utterance_values, "train_offline", lambda *args, **parts: seen.append((args[2], args[3], parts)) or 0.0
    )
    common = ["--start", str(runs / "bc"), "--gamma", "0.8", "--tau", "0.25", "--candidates", "3"]
    assert train(runs, recipe, "unused", *common, *more) == 0
    return seen[0]


def test_options_of_chai_reach_its_loss_and_its_policy(runs, monkeypatch):
    loss, policy, parts = seen_by_training(runs, "chai", monkeypatch, "--cql-weight", "0.3")
    assert (loss.gamma, loss.cql_weight, policy.candidates, parts["target_updater"].eps) == (0.8, 0.3, 3, 0.75)
    with pytest.raises(ValueError, match="chai trains no block"):
        (CHAI(data=runs / "data", out=runs / "unused", start=runs / "bc", top_layers=1))


def test_options_of_utterance_ilql_reach_its_loss_and_its_policy(runs, monkeypatch):
    weights = ["--value-weight", "0.6", "--qvalue-weight", "0.7", "--log-prob-weight", "0.2", "--expectile", "0.9"]
    loss, policy, parts = seen_by_training(runs, "utterance-ilql", monkeypatch, *weights)
    assert (loss.gamma, loss.expectile, loss.value_weight, loss.qvalue_weight) == (0.8, 0.9, 0.6, 0.7)
    decoder = policy.decoder
    assert (loss.transition_weight, parts["target_updater"].eps) == (1.0, 0.75)
    assert loss.end_of_action == decoder.control.end_of_action
    assert (decoder.candidates, decoder.end_value_weight, decoder.log_prob_weight) == (3, 1.0, 0.2)


@pytest.mark.parametrize("recipe", ["chai", "utterance-ilql"])
def test_a_resumed_run_ends_with_the_same_numbers(runs, recipe):
    """The candidates are sampled again, the same ones."""
    common = ["--start", str(runs / "bc"), "--eval-every", "2", "--log-every", "1"]
    assert train(runs, recipe, f"{recipe}-whole", *common, "--steps", "4") == 0
    whole = read_columns(runs / f"{recipe}-whole" / "log.csv")
    checkpoints = runs / f"{recipe}-whole" / "checkpoints"
    last = max(checkpoints.iterdir(), key=lambda path: path.name)
    shutil.rmtree(last)
    assert train(runs, recipe, f"{recipe}-whole", *common, "--steps", "4") == 0
    again = read_columns(runs / f"{recipe}-whole" / "log.csv")
    held_out = "held_out_value_loss" if recipe == "chai" else "held_out_loss"
    for name in ("loss_qvalue", held_out, "return"):
        assert again[name] == pytest.approx(whole[name], rel=1e-5, nan_ok=True)


def test_chai_needs_a_language_model_to_start_from(runs, capsys):
    assert train(runs, "chai", "nothing") == 2
    assert "give --start, a run of BC" in capsys.readouterr().err
