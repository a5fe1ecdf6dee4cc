"""Two processes that train together have the numbers of one."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.recipes.commands import weights_of
from tests.recipes.ranks import rows_of, run
from tests.recipes.walks import ALGORITHMS, generate
from torchrl_lang.__main__ import main

pytestmark = pytest.mark.slow

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--eval-games", "4"]
# Batches that two processes cannot share equally, the last of an epoch among them.
STEPS = ["--batch-size", "25", "--optimizer", "adamw", "--steps", "6", "--log-every", "1", "--eval-every", "6"]
ONLINE = ["--iterations", "4", "--games", "16", "--turns", "7", "--batch-size", "9", "--eval-every", "4"]
ONLINE += ["--eval-games", "4", "--kl-horizon", "16", "--log-every", "1"]
PPO = ["--value-warmup", "1", "--clip-heads"]
RUNS = {name: (name, ALGORITHMS[name]) for name in ("bc", "ilql", "qsft", "kto", "oreo")}
RUNS["ilql"] = ("ilql", [*ALGORITHMS["ilql"], "--ema-decay", "0.9", "--clip-heads"])
RUNS["adapters"] = ("bc", ["--start", "bc", "--lora-rank", "2"])
COMPARED = ("ilql", "qsft", "kto", "adapters")
SHARDED = ("bc", "ilql", "qsft", "oreo", "kto", "adapters")


def command(folder, name, out, *more):
    recipe, own = RUNS[name]
    options = [str(folder / "bc") if word == "bc" else str(word) for word in (*own, *more)]
    place = ["train", recipe, "--data", folder / "data", "--out", folder / out]
    return [str(word) for word in (*place, *SMALL, *STEPS, *options)]


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """A folder with a dataset and runs of one process."""
    folder = tmp_path_factory.mktemp("walks")
    generate(folder)
    for name in RUNS:
        assert main(command(folder, name, name)) == 0
    (folder / "games").mkdir()
    assert_ended(run(["replay", folder / "games", *online(folder, "ppo", "ppo", *PPO)], number=1))
    return folder


def online(folder, recipe, out, *more):
    place = ["train", recipe, "--start", folder / "bc", "--out", folder / out]
    return [str(word) for word in (*place, *ONLINE, *more)]


def assert_same_curves(folder, *runs):
    one, two = (torch.tensor(rows_of(folder / run, "loss", "grad_norm")) for run in runs)
    assert len(one) == len(two) > 3
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
    torch.testing.assert_close(*(weights_of(folder / run) for run in runs), rtol=0, atol=1e-3)


def assert_ended(programs, status=0):
    said = "\n".join(program.stderr for program in programs)
    assert [program.returncode for program in programs] == [status] * len(programs), said


def test_two_processes_have_the_curve_of_one_and_one_of_them_prints(walks):
    programs = run(*(command(walks, name, f"{name}-2") for name in COMPARED))
    assert_ended(programs)
    for name in COMPARED:
        assert_same_curves(walks, name, f"{name}-2")
    assert programs[0].stdout.count("model in") == len(COMPARED)
    assert programs[1].stdout + programs[1].stderr == ""


def test_a_run_is_stopped_continues_in_another_number_of_processes_loses_one_and_resumes(walks):
    resumed = command(walks, "ilql", "resumed")
    for number, step in ((2, "2"), (1, "4")):
        assert_ended(run(["stop", step, *resumed], number=number), 143)
    began = time.monotonic()
    died, other = run(["kill", "5", *resumed])
    assert (died.returncode, other.returncode) == (-signal.SIGKILL, 2)
    assert time.monotonic() - began < 60
    assert [line for line in other.stderr.splitlines() if "torchrl_lang" in line] == [
        "torchrl_lang: another process of this run has ended, and so this one does; the same command continues from "
        "the last checkpoint."
    ]
    assert_ended(run(resumed))
    assert_same_curves(walks, "ilql", "resumed")


def test_what_cannot_be_shared_is_refused_in_one_line(walks):
    few = command(walks, "bc", "few", "--batch-size", "1")
    programs = run(few)
    assert_ended(programs, 2)
    said = [line for program in programs for line in program.stderr.splitlines()]
    assert said == ["torchrl_lang: --batch-size 1 is fewer than one for each of 2 processes."]
    assert_ended(programs := run(command(walks, "ilql", "ilql", "--lr", "0.5")), 2)
    (line,) = [line for program in programs for line in program.stderr.splitlines()]
    assert "ilql holds a run with other options: --lr was" in line
    assert_ended(programs := run(["evaluate", walks / "bc"]), 2)
    assert "leave out torchrun" in programs[0].stderr


def test_two_processes_learn_from_games_what_one_does(walks):
    assert_ended(run(["replay", walks / "games", *online(walks, "ppo", "ppo-2", *PPO)]))
    assert_same_curves(walks, "ppo", "ppo-2")
    figures = "return", "kl", "kl_coef", "games", "explained_variance", "loss_critic"
    one, two = (torch.tensor(rows_of(walks / run, *figures)) for run in ("ppo", "ppo-2"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


def test_each_process_plays_its_share(walks):
    command = online(walks, "grpo", "grpo", "--group-size", "4", "--eval-every", "2")
    assert_ended(run(["stop", "3", *command]), 143)
    assert_ended(run(command, number=1))
    games = [row[0] for row in rows_of(walks / "grpo", "games")]
    assert min(games) >= 16
    assert_ended(run(online(walks, "archer", "archer", "--value-steps", "2", "--draws", "8", "--value-warmup", "1")))
    for more, message in (
        (["--games", "15"], "--games 15 cannot be shared out to 2 processes"),
        (["--collector", "sync"], "without --collector"),
    ):
        assert_ended(refused := run(online(walks, "ppo", "refused", *more)), 2)
        assert [message in program.stderr for program in refused].count(True) == 1


def test_sharded_models_have_the_curve_of_whole_ones(walks, tmp_path):
    commands = [command(walks, name, f"{name}-shard", "--shard") for name in SHARDED]
    replayed = online(walks, "ppo", "ppo-shard", *PPO, "--shard")
    assert_ended(run(*commands, ["replay", walks / "games", *replayed]))
    for name in (*SHARDED, "ppo"):
        assert_same_curves(walks, name, f"{name}-shard")


def test_a_sharded_run_continues_whole_and_the_other_way_round(walks):
    resumed = command(walks, "ilql", "parts")
    assert_ended(run(["stop", "2", *resumed, "--shard"]), 143)
    (shards,) = walks.glob("parts/checkpoints/*/shards")
    files = list(shards.iterdir())
    assert len(files) == 2  # of each process its own
    for file in files:
        heads = [f"state/loss/{name}qvalue_network_params.module.out_weight" for name in ("", "target_")]
        assert all(load_file(file)[name].numel() for name in heads)  # a part of each value head
    assert_ended(run(["stop", "4", *resumed], number=1), 143)
    assert_ended(run([*resumed, "--shard"]))
    assert_same_curves(walks, "ilql", "parts")
    played = online(walks, "grpo", "grpo-parts", "--group-size", "4", "--eval-every", "2", "--shard")
    assert_ended(run(["stop", "3", *played]), 143)
    assert_ended(run(played))
