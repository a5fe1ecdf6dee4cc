"""`train ad`: what a run writes, how it continues, and on which tasks its checkpoint is chosen."""

import importlib
import json

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.commands import assert_same, assert_same_runs, interrupted_at, refused, words_of
from torchrl_lang.__main__ import main
from torchrl_lang.algorithm_distillation import load_ad_model, record_history
from torchrl_lang.evaluation.plots import read_columns
from torchrl_lang.recipes.algorithm_distillation import formats
from torchrl_lang.recipes.algorithm_distillation.histories import TaskFamily, source_on
from torchrl_lang.recipes.algorithm_distillation.options import AD
from torchrl_lang.training import Checkpointer

ad = importlib.import_module("torchrl_lang.recipes.algorithm_distillation.ad")
TASKS = {"size": 3, "episode_length": 6}
SIZES = {"streams": 4, "context_episodes": 2, "width": 8, "heads": 2, "layers": 1, "batch_size": 8, "fresh_every": 3}
TIMES = {"steps": 8, "eval_every": 2, "log_every": 1, "episodes": 4, "eval_streams": 3}


def command(out, *more):
    return [str(word) for word in ("train", "ad", "--out", out, *words_of(TASKS | SIZES | TIMES), *more)]


def train(out, *more):
    return main(command(out, *more))


def family():
    return TaskFamily(AD(out="x", **TASKS))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run; tests must not write into it."""
    out = tmp_path_factory.mktemp("ad") / "run"
    assert train(out) == 0
    return out


def test_a_run_writes_its_options_log_and_model(run):
    config = json.loads((run / "config.json").read_text())
    assert (config["steps"], config["size"], config["source"]) == (8, 3, None)
    assert config["family"] == family().describe()
    log = read_columns(run / "log.csv")
    assert log["step"] == list(range(1, 9))
    assert all(value > 0 for value in log["loss_action"])
    assert [value == value for value in log["return"]] == [False, True] * 4
    trained_on = json.loads((run / "model" / "ad_model.json").read_text())["trained_on"]
    assert (trained_on["family"], trained_on["source"]) == (config["family"], "posterior")
    model = load_ad_model(run / "model")
    assert (model.context, model.episode_length, model.width, model.heads) == (12, 6, 8, 2)


@pytest.mark.parametrize("format", ["rl", pytest.param("language", marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_with_the_same_numbers(format, tmp_path):
    """Stopped in its third save, it continues after step 4, amid a block of histories."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    more = ["--format", format, "--steps", "6", "--episodes", "3", "--eval-streams", "1"]
    assert train(whole, *more) == 0
    with interrupted_at(Checkpointer, "save", 3):
        assert train(out, *more) == 130
    assert not (out / "model").exists()
    assert train(out, *more) == 0
    assert_same_runs(out, whole)


def test_the_checkpoint_is_the_best_on_validation_tasks(tmp_path, monkeypatch):
    scripted, weights, evaluated = iter([1.0, 3.0, 2.0, 0.5]), [], []

    def evaluate(env, policy, episodes, *, seed):
        evaluated.append(env.fixed_task[:, 0].tolist())
        weights.append({name: value.clone() for name, value in policy.model.state_dict().items()})
        assert not policy.model.training
        return torch.full((*env.batch_size, episodes), next(scripted))

    monkeypatch.setattr(ad, "evaluate_in_context", evaluate)
    assert train(tmp_path / "run") == 0
    assert evaluated == [family().split.validation.tolist()] * 4
    assert_same(load_file(tmp_path / "run" / "model" / "model.safetensors"), weights[1])
    assert any(not torch.equal(weights[1][name], weights[3][name]) for name in weights[1])


def test_options_reach_the_loss(monkeypatch, tmp_path):
    seen = []

    class StoppedLoss(formats.ADLoss):
        def __init__(self, model, **options):
            seen.append((model, options))
            raise KeyboardInterrupt

    monkeypatch.setattr(formats, "ADLoss", StoppedLoss)
    more = ["--label-smoothing", "0.1", "--reward-weight", "0.2", "--observation-weight", "0.3", "--layers", "2"]
    assert train(tmp_path / "run", *more) == 130
    ((model, options),) = seen
    assert options == {"label_smoothing": 0.1, "reward_weight": 0.2, "observation_weight": 0.3}
    assert len(model.trunk.blocks) == 2


@pytest.mark.parametrize(
    "more",
    [
        ["--env", "dark_key_door", "--tasks", "20", "--history-episodes", "12", "--skip-episodes", "3"],
        ["--env", "bandit", "--tasks", "20", "--reward-weight", "1", "--observation-weight", "1"],
    ],
)
def test_every_family_and_source_trains(more, tmp_path):
    assert train(tmp_path / "run", *more, "--steps", "2") == 0
    log = read_columns(tmp_path / "run" / "log.csv")
    assert ("loss_reward" in log) == ("--reward-weight" in more)
    assert load_ad_model(tmp_path / "run" / "model").context == 12


def recorded(folder, seed):
    options = AD(out="x", **TASKS, source="noise")
    env = family().env(family().split.train, 4)
    record_history(folder, source_on(options, env, seed=seed))
    return folder


def test_a_run_continues_with_its_recorded_history_alone(tmp_path, capsys):
    one, other, out = recorded(tmp_path / "one", 1), recorded(tmp_path / "other", 2), tmp_path / "run"
    with interrupted_at(Checkpointer, "save", 2):
        assert train(out, "--source", "noise", "--history", one) == 130
    for more in (["--history", other], []):
        assert "other options: history_digest." in refused(capsys, *command(out, "--source", "noise", *more))
    assert train(out, "--source", "noise", "--history", one.rename(tmp_path / "moved")) == 0
    trained_on = json.loads((out / "model" / "ad_model.json").read_text())["trained_on"]
    assert (trained_on["source"]["algorithm"], trained_on["source"]["seed"]) == ("NoisyExpert", 1)
