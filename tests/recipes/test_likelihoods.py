"""The recipes of Q-SFT and OREO: what they start from, what reaches the loss, what a run saves and what it learns."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from tests.recipes.interrupt import interrupted_at_evaluation
from torchrl_lang.__main__ import main
from torchrl_lang.evaluation import read_columns
from torchrl_lang.recipes import token_values
from torchrl_lang.recipes.datasets import open_dataset
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.token_values import return_range
from torchrl_lang.text import CharTokenizer

TINY = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "8", "--batch-size", "16", "--steps", "3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A dataset of 120 walks, and BC on it."""
    folder = tmp_path_factory.mktemp("likelihoods")
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "120"]
    assert main(["generate", "random_walks", "--out", str(folder / "data"), *graph]) == 0
    assert main(["train", "bc", "--data", str(folder / "data"), "--out", str(folder / "bc"), *TINY]) == 0
    return folder


def train(folder, recipe, out, *more):
    common = ["--data", str(folder / "data"), "--out", str(folder / out), "--start", str(folder / "bc")]
    return main(["train", recipe, *common, *TINY, *more])


def seen_by_training(runs, recipe, monkeypatch, *more):
    """Loss, policy and further parts that a recipe hands to the training loop."""
    seen = {}

    def look(options, data, loss, policy, save, check, **parts):
        seen.update(loss=loss, policy=policy, **parts)
        return 0.0

    monkeypatch.setattr(token_values, "train_offline", look)
    assert train(runs, recipe, "unused", *more) == 0
    return seen


@pytest.mark.parametrize("recipe", ["qsft", "oreo"])
def test_a_policy_to_start_from_is_needed(runs, recipe, capsys):
    common = ["--data", str(runs / "data"), "--out", str(runs / "none"), *TINY]
    assert main(["train", recipe, *common]) == 2
    assert "starts from a policy that imitates the data" in capsys.readouterr().err


def test_options_of_q_sft_reach_its_loss_and_its_policy(runs, monkeypatch):
    more = ["--beta", "3", "--threshold", "0.2", "--tau", "0.25", "--gamma", "0.9", "--turn-gamma", "0.8"]
    seen = seen_by_training(runs, "qsft", monkeypatch, *more, "--guide", "ratio")
    loss, rule = seen["loss"], seen["policy"].decoder.rule
    dataset, _ = open_dataset(runs / "data")
    assert (loss.value_min, loss.value_max) == return_range(dataset.rows, dataset.tokenizer, 0.9, 0.8)
    assert (loss.gamma, loss.turn_gamma, loss.threshold, loss.rest) == (0.9, 0.8, 0.2, dataset.tokenizer.control.pad)
    assert seen["target_updater"].eps == 0.75
    assert (rule.guidance.beta, rule.guidance.ratio, rule.min_p) == (3.0, True, 0.2)
    of_reference = dict(loss.reference.actor.named_parameters())
    assert all(
        weight is of_reference[name] for name, weight in seen["policy"].named_parameters() if name in of_reference
    )
    more = ["--rest", "all", "--value-min", "-9", "--value-max", "1"]
    seen = seen_by_training(runs, "qsft", monkeypatch, *more)
    loss, rule = seen["loss"], seen["policy"].decoder.rule
    assert (loss.value_min, loss.value_max, loss.rest) == (-9.0, 1.0, None)
    assert (rule.guidance.ratio, rule.min_p) == (False, None)


def test_options_of_oreo_reach_its_loss(runs, monkeypatch):
    more = ["--reward-scale", "0.3", "--kl-weight", "0.2", "--value-weight", "0.7", "--level", "utterance"]
    seen = seen_by_training(runs, "oreo", monkeypatch, *more)
    loss = seen["loss"]
    assert (loss.beta, loss.kl_controller(), loss.value_weight, loss.level) == (0.3, 0.2, 0.7, "utterance")
    assert seen["policy"].decoder.rule.guidance is None
    start = load_run(runs / "bc").model.lm.get_input_embeddings().weight
    assert any(torch.equal(weight, start) for weight in loss.reference.state().values())


def test_the_range_of_returns_by_hand():
    tokenizer = CharTokenizer.from_alphabet("ab")
    end = tokenizer.control.end_of_action
    rows = TensorDict(
        tokens=torch.tensor([[7, 7, end, 7, 7, end], [7, 7, end, 7, 0, 0]]),
        attention_mask=torch.tensor([[True] * 6, [True] * 4 + [False] * 2]),
        agent_mask=torch.tensor([[False, True, True, False, True, True], [False, True, True, False, False, False]]),
        token_reward=torch.tensor([[0.0, 0.0, -1.0, 0.0, 0.0, -4.0], [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]]),
        batch_size=[2],
    )
    # From the right: -4, half of it, a quarter of that less 1, half of that.
    assert return_range(rows, tokenizer, gamma=0.5, turn_gamma=0.25) == (-4.0, 2.0)
    assert return_range(rows[:1], tokenizer, gamma=0.5, turn_gamma=0.25) == (-4.0, -0.75)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qsft", "oreo"])
def test_a_run_is_logged_and_continues_where_it_was_stopped(runs, recipe):
    options = ["--steps", "4", "--eval-every", "2"]
    assert train(runs, recipe, f"whole-{recipe}", *options) == 0
    with interrupted_at_evaluation(2):
        assert train(runs, recipe, f"halves-{recipe}", *options) == 130
    assert train(runs, recipe, f"halves-{recipe}", *options) == 0
    whole, halves = (read_columns(runs / f"{kind}-{recipe}" / "log.csv") for kind in ("whole", "halves"))
    loss = "loss_qvalue" if recipe == "qsft" else "loss_value"
    held_out = "held_out_value_loss" if recipe == "qsft" else "held_out_loss"
    for name in ("return", loss, held_out):
        assert whole[name] == pytest.approx(halves[name], rel=1e-5, nan_ok=True), name


@pytest.mark.slow
def test_shortest_paths_that_the_data_do_not_take(tmp_path):
    """With the presets of the task, from an imitation that hardly arrives."""
    graph = ["--nodes", "10", "--max-turns", "7", "--games", "1000"]
    assert main(["generate", "random_walks", "--out", str(tmp_path / "data"), *graph]) == 0
    common = ["--data", str(tmp_path / "data"), "--batch-size", "48", "--eval-games", "128"]
    found = {}
    for name, steps in {"bc": 100, "qsft": 300, "oreo": 300}.items():
        start = [] if name == "bc" else ["--start", str(tmp_path / "bc")]
        more = ["--out", str(tmp_path / name), "--steps", str(steps), "--eval-every", str(steps)]
        assert main(["train", name, *common, *start, *more]) == 0
        found[name] = read_columns(tmp_path / name / "log.csv")["optimality"][-1]
    assert found["bc"] < 0.5
    assert found["qsft"] > 0.95
    assert found["oreo"] > 0.9
