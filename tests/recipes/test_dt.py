"""`train dt`: the range and the target of its returns, its held-out loss, and its saved model."""

from __future__ import annotations

import json

import pytest
import torch

from torchrl_lang.__main__ import main
from torchrl_lang.data import load_dataset, row_returns
from torchrl_lang.evaluation import imitation_loss, read_columns
from torchrl_lang.modules import (
    ReturnConditionedActor,
    UtteranceActor,
    causal_lm,
    condition_on_returns,
    language_actor,
    load_language_model,
)
from torchrl_lang.objectives import DecisionTransformerLoss
from torchrl_lang.recipes import imitation as dt
from torchrl_lang.recipes.algorithms import DT
from torchrl_lang.recipes.imitation import build_returns, held_out_loss
from torchrl_lang.recipes.load_run import load_run

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A dataset of 120 walks."""
    folder = tmp_path_factory.mktemp("dt")
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(folder / "data"), *graph]) == 0
    return folder


def train(home, name, *more):
    return main(["train", "dt", "--data", str(home / "data"), "--out", str(home / name), *TINY, *more])


def built(home, **options):
    dataset = load_dataset(home / "data")
    options = DT(data=home / "data", out=home / "x", **options)
    return build_returns(options, dataset.rows, 16, dataset.tokenizer.control.end_of_action), dataset[:]


@pytest.mark.parametrize("mode", ["constant", "decremented"])
def test_the_range_is_that_of_the_data_and_the_target_the_mean_of_the_best_tenth(home, mode):
    returns, rows = built(home, mode=mode)
    wholes = row_returns(rows)
    assert returns.target == pytest.approx(float(wholes[:108].sort(descending=True).values[:11].mean()))
    # The return to go before a last move is its reward, -1.
    assert (returns.low, returns.high) == (float(wholes.min()), float(wholes.max()) if mode == "constant" else -1.0)
    assert returns.mode == mode


def test_a_target_beyond_the_data_widens_the_range(home):
    plain, _ = built(home)
    with pytest.warns(UserWarning, match=r"target_return=3 lies outside the returns of the data, \[-"):
        wider, _ = built(home, target_return=3.0)
    assert (wider.low, wider.high, wider.target) == (plain.low, 3.0, 3.0)
    inside, _ = built(home, target_return=plain.low)
    assert (inside.low, inside.high, inside.target) == (plain.low, plain.high, plain.low)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["constant", "decremented"])
def test_a_run_saves_what_its_policy_needs(home, mode, monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(dt, "condition_on_returns", lambda actor, returns: trained.append(
        condition_on_returns(actor, returns)) or actor)  # fmt: skip
    assert train(home, mode, "--mode", mode, "--steps", "40", "--eval-every", "20") == 0
    assert f"{mode}: asks for the return" in capsys.readouterr().out
    saved = load_language_model(home / mode / "model")
    returns = saved.heads["returns"]
    actor, rows = condition_on_returns(language_actor(saved.lm), returns), load_dataset(home / "data")[:]
    assert returns.weight.any()
    ids = rows["tokens"].clone()
    ids[:, 0] += 700 * saved.lm.config.vocab_size
    batch = rows.set("tokens", ids)
    with torch.no_grad():
        assert torch.equal(actor.get_dist(batch).logits, trained[0].get_dist(batch).logits)
    run = load_run(home / mode)
    kept = load_dataset(home / "data")[108:]
    end = run.tokenizer.control.end_of_action
    logged = read_columns(home / mode / "log.csv")
    assert held_out_loss(actor, kept, end) in [pytest.approx(value, rel=1e-4) for value in logged["held_out_loss"]]
    policy = ReturnConditionedActor(UtteranceActor(actor, run.tokenizer.control, run.action_length, method="greedy"))
    assert policy.target_return == returns.target
    summary, _ = run.task.evaluate(policy, games=8, seed=1)
    assert summary.mean_return == pytest.approx(max(value for value in logged["return"] if value == value), abs=1e-3)
    assert json.loads((home / mode / "config.json").read_text())["mode"] == mode


def test_the_held_out_loss_without_returns_is_that_of_imitation(home):
    returns, rows = built(home)
    torch.manual_seed(0)
    lm = causal_lm(vocab_size=30, layers=1, width=16, heads=2, max_length=64)
    actor = condition_on_returns(language_actor(lm), returns)  # zero
    end = load_dataset(home / "data").tokenizer.control.end_of_action
    plain = imitation_loss(language_actor(lm), rows, batch_size=50)
    assert held_out_loss(actor, rows, end, batch_size=50) == pytest.approx(plain, rel=1e-5)
    with torch.no_grad():
        returns.weight.normal_()
    loss = DecisionTransformerLoss(actor, actor_normalizer="action", end_of_action=end)(rows)["loss_actor"]
    found = held_out_loss(actor, rows, end, batch_size=50)
    assert found == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found != pytest.approx(plain, rel=1e-5)


def test_options_reach_the_loss_and_the_policy(home, monkeypatch):
    seen = []
    monkeypatch.setattr(dt, "train_offline", lambda *args, **_: seen.append(args[2:4]) or 0.0)
    assert train(home, "unused", "--transition-weight", "0.3", "--target-return", "-2.5") == 0
    loss, policy = seen[0]
    assert (loss.transition_weight, loss.actor_normalizer) == (0.3, "action")
    assert loss.end_of_action == policy.actor.decoder.control.end_of_action
    assert (policy.target_return, policy.actor.method) == (-2.5, "greedy")


@pytest.mark.slow
def test_a_run_resumes_with_the_same_numbers(home, monkeypatch):
    options = ["--steps", "8", "--eval-every", "4", "--target-return", "-2.5"]
    assert train(home, "whole", *options) == 0

    evaluations = []

    def stop_in_the_second(*args):
        evaluations.append(1)
        if len(evaluations) == 2:
            raise KeyboardInterrupt
        return held_out_loss(*args)

    with monkeypatch.context() as patched:
        patched.setattr(dt, "held_out_loss", stop_in_the_second)
        assert train(home, "broken", *options) == 130
    assert train(home, "broken", *options) == 0
    whole, broken = (load_language_model(home / name / "model") for name in ("whole", "broken"))
    assert torch.equal(whole.heads["returns"].weight, broken.heads["returns"].weight)
    assert whole.heads["returns"].config() == broken.heads["returns"].config()
    assert whole.heads["returns"].target == -2.5
    assert train(home, "whole", *options[:4], "--target-return", "-3") == 2  # another target is another run


def test_wrong_options_are_named(home, capsys):
    assert train(home, "wrong", "--target-return", "much") == 2
    assert "--target-return should be a valid number or 'best', got much" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--target-return should be"):
        DT(data=home, out=home, target_return=float("nan"))
