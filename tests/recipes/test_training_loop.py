"""The training loop of recipes with stored data: the moving average of weights is what is evaluated and saved."""

from __future__ import annotations

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang.evaluation import imitation_loss, read_columns
from torchrl_lang.modules import language_actor
from torchrl_lang.recipes import runs as training_loop
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16"]
AVERAGED = ["--steps", "6", "--eval-every", "3", "--ema-decay", "0.3", "--lr", "0.02"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop") / "data"
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(folder), *graph]) == 0
    return folder


def train(data, out, *options, recipe="ilql"):
    assert main(["train", recipe, "--data", str(data), "--out", str(out), *TINY, *options]) == 0
    return load_run(out).model


def weights_of(model):
    heads = {f"{name}.{key}": w for name, head in model.heads.items() for key, w in head.state_dict().items()}
    return {**model.lm.state_dict(), **heads}


def test_the_saved_model_is_the_average_of_the_steps(data, tmp_path, monkeypatch):
    """Computed from the language model's weights after each step of a run without an average."""
    steps = []
    original = training_loop.train_steps

    def recorded(loss, *args, **options):
        network = loss.actor_network_params if hasattr(loss, "actor_network_params") else loss
        for step in original(loss, *args, **options):
            weights = dict(network.named_parameters())
            steps.append(next(w.detach().clone() for name, w in weights.items() if "wpe" in name))
            yield step

    monkeypatch.setattr(training_loop, "train_steps", recorded)
    one_evaluation = ["--steps", "6", "--eval-every", "6", "--lr", "0.02"]
    last = train(data, tmp_path / "last", *one_evaluation)
    assert len(steps) == 6
    torch.testing.assert_close(last.lm.transformer.wpe.weight, steps[-1])
    begin = train(data, tmp_path / "begin", "--steps", "1", "--lr", "1e-12", "--weight-decay", "0")
    expected = begin.lm.transformer.wpe.weight.detach()
    for n, weight in enumerate(steps[:6], start=1):
        decay = min(0.3, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * weight
    averaged = train(data, tmp_path / "averaged", *one_evaluation, "--ema-decay", "0.3")
    torch.testing.assert_close(averaged.lm.transformer.wpe.weight.detach(), expected)
    assert not torch.allclose(expected, steps[5], atol=1e-4)


def test_the_figures_are_those_of_the_average(data, tmp_path):
    model = train(data, tmp_path / "run", "--steps", "5", "--ema-decay", "0.5", "--lr", "0.02")
    rows = open_dataset(data)[0][108:]
    logged = read_columns(tmp_path / "run" / "log.csv")
    assert logged["held_out_loss"][-1] == pytest.approx(imitation_loss(language_actor(model.lm), rows), rel=1e-4)


def test_a_run_that_was_stopped_ends_with_the_same_average(data, tmp_path, monkeypatch):
    whole = weights_of(train(data, tmp_path / "whole", *AVERAGED))
    original = training_loop.train_steps

    def stopped(*args, **options):
        for step, figures in original(*args, **options):
            if step == 5:
                raise KeyboardInterrupt
            yield step, figures

    with monkeypatch.context() as patch:
        patch.setattr(training_loop, "train_steps", stopped)
        stop = ["train", "ilql", "--data", str(data), "--out", str(tmp_path / "stopped"), *TINY, *AVERAGED]
        assert main(stop) == 130
    resumed = weights_of(train(data, tmp_path / "stopped", *AVERAGED))
    assert resumed.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name


@pytest.mark.parametrize("recipe", ["bc", "cql", "utterance-ilql", "dt"])
def test_other_recipes_take_an_average(recipe, data, tmp_path):
    plain = weights_of(train(data, tmp_path / "plain", "--steps", "3", recipe=recipe))
    averaged = weights_of(train(data, tmp_path / "averaged", "--steps", "3", "--ema-decay", "0.9", recipe=recipe))
    assert any(not torch.equal(plain[name], weight) for name, weight in averaged.items())


def test_a_run_cannot_be_resumed_with_another_decay(data, tmp_path, capsys):
    train(data, tmp_path / "run", *AVERAGED)
    again = ["train", "ilql", "--data", str(data), "--out", str(tmp_path / "run"), *TINY, *AVERAGED]
    assert main([*again, "--ema-decay", "0"]) == 2
    assert "--ema-decay was 0.3 and is 0.0" in capsys.readouterr().err
