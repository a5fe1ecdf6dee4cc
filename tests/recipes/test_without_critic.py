"""Recipes that compare games of the same start: a known best policy, resuming, processes, and where the KL is."""

import signal
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.commands import assert_same_runs, checkpoints, interrupted_at, log_of
from torchrl_lang.__main__ import main
from torchrl_lang.envs import LanguageEnv
from torchrl_lang.envs.games import CorridorEnv, corridor_value
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.recipes.algorithms import GRPO, RLOO
from torchrl_lang.recipes.collect import Games
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.online import OnlineRun, kl_transform, load_initial_policy
from torchrl_lang.recipes.online_algorithms import GroupLearner, PPOLearner
from torchrl_lang.recipes.tasks import find_task
from torchrl_lang.training.curriculum import Curriculum

pytestmark = pytest.mark.usefixtures("spawn")

TASK = "torchrl_lang.envs.games:CorridorEnv"
SMALL = ["--task", TASK, "--games", "16", "--turns", "3", "--batch-size", "8", "--eval-games", "4", "--lr", "0.003"]
SHORT = [*SMALL, "--iterations", "4", "--eval-every", "3"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Imitates random moves on the corridor."""
    home = tmp_path_factory.mktemp("corridor")
    assert main(["generate", TASK, "--out", str(home / "data"), "--games", "200", "--batch", "50"]) == 0
    small = ["--layers", "1", "--width", "32", "--heads", "2", "--batch-size", "32", "--eval-games", "8"]
    bc = ["train", "bc", "--data", home / "data", "--task", TASK, "--out", home / "bc", *small]
    assert main([*map(str, bc), "--steps", "60", "--eval-every", "60"]) == 0
    return home / "bc"


def arguments(recipe, start, out, *more):
    groups = [] if recipe in ("reinforce++", "ppo", "turn-ppo") else ["--group-size", "4"]
    return ["train", recipe, "--start", str(start), "--out", str(out), *SHORT, *groups, *map(str, more)]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "seed"), [("grpo", 0), ("rloo", 1), ("dapo", 2), ("gspo", 0), ("cispo", 1)])
def test_the_best_policy_is_found(recipe, seed, start, tmp_path):
    """Its return on the games of the evaluation is known: each move but the last costs 1."""
    more = ["--games", 64, "--turns", 8, "--batch-size", 64, "--group-size", 8, "--iterations", 20]
    more += ["--eval-games", 256, "--eval-every", 20, "--seed", seed]
    assert main(arguments(recipe, start, tmp_path / "run", *more)) == 0
    log = log_of(tmp_path / "run")
    places = CorridorEnv(batch_size=[256], seed=seed + 1).reset()["tokens"][:, 1]
    best = corridor_value(3 - places).mean().item()
    assert float(log[0]["return"]) < best - 3
    assert float(log[-1]["eval_return"]) > best - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["dapo", "gigpo", "reinforce++", "turn-ppo"])
def test_a_stopped_run_ends_with_the_same_numbers(recipe, start, tmp_path, monkeypatch):
    """Stopped between evaluations, while games go on and, of groups, some rows wait for others."""
    more = ["--value-warmup", "0"] if recipe == "turn-ppo" else []
    whole, stopped = (arguments(recipe, start, tmp_path / name, *more) for name in ("whole", "stopped"))
    assert main(whole) == 0
    learner = PPOLearner if recipe == "turn-ppo" else GroupLearner
    draw, calls = learner.draw, []

    def signalled(*args):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return draw(*args)

    monkeypatch.setattr(learner, "draw", signalled)
    assert main(stopped) == 128 + signal.SIGTERM
    (path,) = checkpoints(tmp_path / "stopped")
    kept = load_file(path / "tensors.safetensors")
    waits = any("waiting" in name and len(value) for name, value in kept.items())
    assert waits == (recipe not in ("reinforce++", "turn-ppo"))
    assert main(stopped) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_an_interrupted_run_with_a_curriculum_ends_with_the_same_numbers(start, tmp_path):
    whole, broken = (arguments("dapo", start, tmp_path / name, "--curriculum", "3") for name in ("whole", "broken"))
    assert main(whole) == 0
    with interrupted_at(PPOLoss, "forward", 16):  # after the checkpoint of iteration 3
        assert main(broken) == 130
    assert checkpoints(tmp_path / "broken")
    assert main(broken) == 0
    assert_same_runs(tmp_path / "whole", tmp_path / "broken")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ppo", "turn-ppo", "grpo", "gspo"])
def test_the_kl_is_in_the_loss_or_in_the_rewards(recipe, start, tmp_path):
    more = ["--value-warmup", "0"] if "ppo" in recipe else []
    for name, weights in (("loss", ("0", "0.1")), ("rewards", ("0.1", "0"))):
        penalty = ["--kl-coef", weights[0], "--kl-weight", weights[1], "--kl-target", "none"]
        assert main(arguments(recipe, start, tmp_path / name, *more, *penalty)) == 0
        log = log_of(tmp_path / name)
        assert any(float(row["loss_kl"]) > 1e-4 for row in log) == (name == "loss")
        assert [float(row["kl_coef"]) for row in log] == pytest.approx([0.1] * 4)
        assert float(log[-1]["kl"]) > 1e-3


@pytest.mark.slow
def test_the_coefficient_of_a_line_is_that_in_its_rewards(start, tmp_path):
    penalty = ["--kl-coef", "0.1", "--kl-target", "1e-4", "--kl-horizon", "100", "--value-warmup", "0"]
    assert main(arguments("ppo", start, tmp_path / "run", *penalty)) == 0
    log = [(float(row["kl_coef"]), float(row["kl"]), float(row["games"])) for row in log_of(tmp_path / "run")]
    assert log[0][0] == pytest.approx(0.1)
    for (coef, kl, games), (following, *_) in pairwise(log):
        assert following == pytest.approx(coef * (1 + min(max(kl / 1e-4 - 1, -0.2), 0.2) * games / 100))


def test_a_kl_in_the_loss_leaves_the_rewards(start):
    options = GRPO(start=start, out=Path("unused"), task=TASK, games=8, kl_weight=0.5)
    begun = load_initial_policy(options)
    kl = kl_transform(options, begun)
    learner = GroupLearner(options, begun, kl.controller)
    assert learner.loss.kl_controller is kl.controller
    assert kl.coef == 0.5
    assert GroupLearner(RLOO(start=start, out=Path("unused"), task=TASK, games=8), begun).loss.kl_controller is None


@pytest.mark.slow
def test_groups_of_several_processes_are_not_mixed(start, tmp_path):
    """Each worker has its own seed, so the numbers of its groups are its own."""
    run = load_run(start, find_task(TASK, {}))
    options = {"workers": 2, "games": 16, "turns": 8, "seed": 0, "device": torch.device("cpu"), "kind": "sync"}
    policy = run.policy(method="sample")
    with closing(Games(run.task, policy, env_options={"group_size": 4}, **options)) as games:
        rows = torch.cat([games.play().rows for _ in range(3)])
    places = rows["tokens"][:, 1]
    for group in rows["group"].unique():
        found = places[rows["group"] == group]
        assert len(found) <= 4
        assert len(found.unique()) == 1
    assert main(arguments("grpo", start, tmp_path / "run", "--collector", "sync", "--turns", "8")) == 0
    assert any(int(row["learned_from"]) % 4 == 0 < int(row["learned_from"]) for row in log_of(tmp_path / "run"))


@pytest.mark.slow
def test_an_iteration_without_groups_that_differ_learns_nothing(start, tmp_path, monkeypatch):
    """Nor do gradients of the iteration before count again."""
    same, iterate, now = LanguageEnv._plan_turn, OnlineRun.iterate, [0]

    def without_reward(env, *args):
        writes, reward = same(env, *args)
        return writes, reward * (now[0] < 3)

    def counted(run, iteration, **options):
        now[0] = iteration
        return iterate(run, iteration, **options)

    monkeypatch.setattr(LanguageEnv, "_plan_turn", without_reward)
    monkeypatch.setattr(OnlineRun, "iterate", counted)
    assert main(arguments("dapo", start, tmp_path / "run", "--draw-limit", "2", "--eval-every", "1")) == 0
    learned = [int(row["learned_from"]) for row in log_of(tmp_path / "run")]
    assert min(learned[:2]) > 0 == max(learned[2:])
    weights = [load_file(path) for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*/*.safetensors"))]
    names = [name for name in weights[-1] if name.startswith("state/loss")]
    assert len(weights) > 1
    assert all(torch.equal(weights[-2][name], weights[-1][name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_run_draws_starts_that_are_sometimes_won(recipe, start, tmp_path, monkeypatch):
    """Walks of two moves: from the first of three places all have the same return."""
    weights, places = [], []

    class Watched(Curriculum):
        def update(self, rows):
            super().update(rows)
            weights.append(self.weights())
            places.extend(rows["tokens"][:, 1].tolist())

    monkeypatch.setattr("torchrl_lang.recipes.online.Curriculum", Watched)
    more = ["--option", "max_turns=2", "--games", 64, "--turns", 2, "--lr", 1e-5, "--curriculum", 100]
    assert main(arguments(recipe, start / "model", tmp_path / "run", *more)) == 0
    assert weights[-1].shape == (3,)
    assert weights[-1].argmin() == 0
    assert places.count(0) < 0.3 * len(places)
