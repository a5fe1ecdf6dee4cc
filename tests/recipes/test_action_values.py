"""The offline recipes without a V: CQL, BCQ and psi-learning."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.interrupt import interrupted_at_evaluation
from torchrl_lang.__main__ import main
from torchrl_lang.evaluation import imitation_loss, read_columns
from torchrl_lang.modules import UtteranceActor, language_actor
from torchrl_lang.modules.save import language_model_of
from torchrl_lang.recipes import token_values as action_values
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "3"]
RECIPES = ["cql", "bcq", "psi"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A dataset of 120 walks, BC on it, and the three from BC's model."""
    folder = tmp_path_factory.mktemp("action_values")
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(folder / "data"), *graph]) == 0
    assert train(folder, "bc", "bc") == 0
    for recipe in RECIPES:
        assert train(folder, recipe, recipe, "--start", str(folder / "bc")) == 0
    return folder


def train(folder, recipe, out, *more):
    return main(["train", recipe, "--data", str(folder / "data"), "--out", str(folder / out), *TINY, *more])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_has_values_that_guide_a_policy(runs, recipe):
    run = load_run(runs / recipe)
    assert run.has_values
    assert set(run.model.heads) == {"target_qvalue", "qvalue"}
    weights = [run.model.heads[name].state_dict() for name in ("target_qvalue", "qvalue")]
    assert any(not torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert main(["evaluate", "--run", str(runs / recipe), "--beta", "0", "2", "--games", "8"]) == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_log_has_the_terms_and_the_held_out_loss(runs, recipe):
    dataset, _ = open_dataset(runs / "data")
    columns = read_columns(runs / recipe / "log.csv")
    model = load_run(runs / recipe).model.lm
    assert columns["held_out_loss"][-1] == pytest.approx(imitation_loss(language_actor(model), dataset[108:]), rel=1e-4)
    assert {"loss_qvalue", "loss_actor", "td_target", "return"} <= columns.keys()
    assert ("loss_cql" in columns) == (recipe == "cql")
    assert not (runs / recipe / "values.json").exists()


@pytest.mark.parametrize(
    ("recipe", "more", "expected"),
    [
        ("cql", ["--beta", "3"], {"beta": 3.0, "include_logits": True, "min_p": None, "method": "greedy"}),
        ("bcq", ["--threshold", "0.2"], {"beta": 1.0, "include_logits": False, "min_p": 0.2, "method": "greedy"}),
        ("bcq", ["--threshold", "0"], {"beta": 1.0, "include_logits": False, "min_p": None, "method": "greedy"}),
        ("psi", ["--threshold", "0.1"], {"beta": 1.0, "include_logits": False, "min_p": 0.1, "method": "sample"}),
    ],
)
def test_the_policy_that_is_evaluated_decodes_as_the_algorithm_does(runs, recipe, more, expected, monkeypatch):
    seen = {}

    def look(options, data, loss, policy, **parts):
        rule = policy.decoder.rule
        seen.update(beta=rule.guidance.beta, include_logits=rule.guidance.include_logits, min_p=rule.min_p)
        seen.update(method=policy.method, loss=loss, eps=parts["target_updater"].eps)
        return 0.0

    monkeypatch.setattr(action_values, "train_offline", look)
    given = ["--gamma", "0.9", "--turn-gamma", "0.8", "--qvalue-weight", "0.7", "--tau", "0.25"]
    assert train(runs, recipe, "unused", *more, *given) == 0
    loss = seen.pop("loss")
    assert seen.pop("eps") == 0.75  # of the target's update
    assert seen == expected
    assert isinstance(loss.actor_network, UtteranceActor)  # knows which tokens cannot be written
    assert (loss.gamma, loss.turn_gamma, loss.qvalue_weight, loss.transition_weight) == (0.9, 0.8, 0.7, 1.0)
    assert getattr(loss, "threshold", 0.0) == (expected["min_p"] or 0.0)


def test_psi_learning_takes_the_policy_of_a_run_as_prior(runs, tmp_path, capsys, monkeypatch):
    losses, real = [], action_values.train_offline
    monkeypatch.setattr(action_values, "train_offline", lambda *args, **parts: losses.append(args[2]) or real(
        *args, **parts))  # fmt: skip
    assert train(runs, "psi", "prior", "--prior", str(runs / "bc"), "--reward-scale", "0.5") == 0
    assert load_run(runs / "prior").has_values
    assert losses[0].reward_scale == 0.5
    prior = language_model_of(losses[0].reference.actor).state_dict()
    for name, weight in load_run(runs / "bc").model.lm.state_dict().items():
        torch.testing.assert_close(prior[name], weight, rtol=0, atol=0)
    assert main(["generate", "wordle", "--words", "10", "--games", "20", "--out", str(tmp_path / "wordle")]) == 0
    common = ["train", "psi", "--data", str(tmp_path / "wordle"), "--out", str(tmp_path / "run")]
    assert main([*common, "--prior", str(runs / "bc"), *TINY]) == 2
    assert "is about random_walks, which has other tokens than the data" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, "psi-prior"])
def test_a_run_that_was_stopped_continues_with_the_same_numbers(runs, name):
    """Also with a policy that samples, and with a prior."""
    recipe, _, prior = name.partition("-")
    options = ["--steps", "4", "--eval-every", "2", *(["--prior", str(runs / "bc")] if prior else [])]
    assert train(runs, recipe, f"whole-{name}", *options) == 0
    with interrupted_at_evaluation(2):
        assert train(runs, recipe, f"halves-{name}", *options) == 130
    assert train(runs, recipe, f"halves-{name}", *options) == 0
    whole, halves = (read_columns(runs / f"{kind}-{name}" / "log.csv") for kind in ("whole", "halves"))
    for column in ("return", "loss_qvalue", "held_out_loss"):
        assert whole[column] == pytest.approx(halves[column], rel=1e-5, nan_ok=True), column


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_shortest_paths_that_the_data_do_not_take(tmp_path, recipe):
    """With the presets of the task."""
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "1000"]
    assert main(["generate", "random_walks", "--out", str(tmp_path / "data"), *graph]) == 0
    common = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--batch-size", "48"]
    assert main(["train", recipe, *common, "--steps", "200", "--eval-every", "200", "--eval-games", "128"]) == 0
    assert read_columns(tmp_path / "run" / "log.csv")["optimality"][-1] > 0.95
