"""Recipes with values of utterances: they train, resume, and save what their policy is built from."""

from __future__ import annotations

import shutil

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang.evaluation import read_columns
from torchrl_lang.modules import CHAIActor, UtteranceActor, UtteranceValueGuidance, language_actor
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
    assert {"return", "held_out_loss", "loss_qvalue", "loss_cql", "candidate_value"} <= set(logged)
    sampling = UtteranceActor(language_actor(run.model.lm), run.tokenizer.control, run.action_length)
    policy = CHAIActor(sampling, run.model.heads["target_chai_qvalue"], candidates=4)
    found, _ = run.task.evaluate(policy, games=8, seed=1)
    assert logged["return"][-1] == pytest.approx(found.mean_return, abs=1e-4)


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
    for name in ("loss_qvalue", "held_out_loss", "return"):
        assert again[name] == pytest.approx(whole[name], rel=1e-5, nan_ok=True)


def test_chai_needs_a_language_model_to_start_from(runs, capsys):
    assert train(runs, "chai", "nothing") == 2
    assert "give a run of BC with --start RUN" in capsys.readouterr().err
