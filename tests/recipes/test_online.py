"""Online recipes from end to end on a tiny scale: play, learn, resume, be killed, several processes."""

import json
import os
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict.nn import TensorDictModuleBase

from tests.processes import Program, wait_until
from tests.recipes.commands import assert_same_runs, checkpoints, interrupted_at, log_of, refused, weights_of
from torchrl_lang.__main__ import main
from torchrl_lang.algorithm_distillation.language import read_run
from torchrl_lang.envs.wordle import wordle_tokenizer
from torchrl_lang.envs.wordle.task import WordleTask
from torchrl_lang.modules import row_log_prob
from torchrl_lang.modules import trunk as trunk_module
from torchrl_lang.recipes import online
from torchrl_lang.recipes.algorithms import PPO, ArCHer
from torchrl_lang.recipes.archer import ArCHerLearner
from torchrl_lang.recipes.collect import Games
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.online import OnlineRun, kl_transform, load_initial_policy
from torchrl_lang.recipes.online_algorithms import PPOLearner

from .test_stopping import SIGNALLED
from .test_workers import listed, shared_names, workers_of

pytestmark = pytest.mark.usefixtures("spawn")

SMALL = ["--iterations", "4", "--games", "8", "--turns", "3", "--batch-size", "4", "--eval-every", "2"]
SMALL += ["--eval-games", "4", "--kl-horizon", "16"]
SHORT = ["--iterations", "2", "--eval-every", "1"]
QUICK = [*SMALL, "--value-warmup", "1"]


@pytest.fixture(scope="module")
def start(wordle):
    """A model that has seen a few games."""
    return wordle / "bc"


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory):
    """A run of PPO that is over; copy it before you change it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert main(arguments("ppo", start, run, "--record-history", str(run.with_name("histories")))) == 0
    return run


def arguments(recipe, start, out, *more):
    options = QUICK if recipe == "ppo" else SMALL
    return ["train", recipe, "--start", str(start), "--out", str(out), *options, *more]


def test_a_run_plays_learns_can_be_judged_and_be_a_start(start, finished, tmp_path, capsys):
    assert main(arguments("rejection", finished, tmp_path / "on", *SHORT)) == 0
    for folder, begun, steps in ((finished, start, 4), (tmp_path / "on", finished, 2)):
        log = log_of(folder)
        assert [row["step"] for row in log] == [str(step) for step in range(1, steps + 1)]
        assert abs(float(log[0]["kl"])) < 1e-5  # the policy is still the reference
        assert changed(begun, folder)
        record = json.loads((folder / "config.json").read_text())
        assert record["reference"] == f"the model in {begun / 'model'}, frozen"
    assert [bool(row["eval_return"]) for row in log_of(finished)] == [False, True, False, True]
    assert main(["evaluate", "--run", str(tmp_path / "on"), "--games", "4", "--no-plots"]) == 0
    assert "on greedy" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["ppo", "rejection"])
def test_layers_that_do_not_train_are_computed_once_for_reference_and_epochs(recipe, start, tmp_path, monkeypatch):
    read, upper_part = [], trunk_module.upper_part
    monkeypatch.setattr(trunk_module, "upper_part", lambda *args: read.append(1) or upper_part(*args))
    for name in ("carried", "plain"):
        read.clear()
        assert main(arguments(recipe, start, tmp_path / name, "--top-layers", "1", *SHORT, "--epochs", "2")) == 0
        assert bool(read) == (name == "carried")
        monkeypatch.setattr(online, "with_frozen_states", lambda actor, rows, **options: rows)
    for carried, plain in zip(*(log_of(tmp_path / name) for name in ("carried", "plain")), strict=True):
        assert float(carried["kl"]) == pytest.approx(float(plain["kl"]), rel=1e-3, abs=1e-5)


def test_a_killed_run_ends_with_the_same_numbers(start, finished, tmp_path):
    """Killed without warning in the iteration after its first checkpoint, then called again."""
    killed, call = tmp_path / "killed", arguments("ppo", start, tmp_path / "killed")
    place = ("torchrl_lang.objectives", "PPOLoss", "estimate", 3, int(signal.SIGKILL))
    assert Program("-c", SIGNALLED, *place, *call).wait() == -signal.SIGKILL
    assert checkpoints(killed)
    assert not (killed / "model").exists()
    assert main(call) == 0
    assert_same_runs(finished, killed)


def test_the_games_of_a_run_are_recorded_and_played_to_their_end_where_new_ones_start(start, tmp_path, monkeypatch):
    """Each iteration is an epoch. New games start after evaluations, but for the last one, which no game follows."""
    run, home, played, to_end, play = tmp_path / "run", tmp_path / "histories", [], [], Games.play

    def kept(games, **options):
        to_end.append(options["to_end"])
        played.append(play(games, **options))
        return played[-1]

    monkeypatch.setattr(Games, "play", kept)
    assert main(arguments("rejection", start, run, "--record-history", str(home))) == 0
    assert to_end == [False, True, False, False]
    records = read_run(home / "run-run")
    config = json.loads((home / "run-run" / "manifest.json").read_text())["config"]
    assert (config["algorithm"], config["games"]) == ("Rejection", 8)
    for epoch, collected in enumerate(played, start=1):
        of_epoch = [record for record in records if record.epoch == epoch]
        for number, row in enumerate(collected.rows.unbind(0)):
            game, agent = [record for record in of_epoch if record.episode == number], row["agent_mask"]
            assert [token for record in game for token in record.response_tokens] == row["tokens"][agent].tolist()
            assert [value for record in game for value in record.log_probs] == row["token_log_prob"][agent].tolist()
            assert sum(record.reward for record in game) == row["token_reward"].sum()
            assert [record.turn for record in game] == list(range(len(game)))
        total = sum(record.reward for record in of_epoch) / len(collected.rows)
        assert total == pytest.approx(float(log_of(run)[epoch - 1]["return"]))


def test_an_interrupted_run_ends_with_the_same_numbers_and_records_no_iteration_twice(
    start, finished, tmp_path, capsys
):
    home, whole = tmp_path / "histories", finished.with_name("histories") / "run-run"
    call = arguments("ppo", start, tmp_path / "broken", "--record-history", str(home))
    with interrupted_at(Games, "play", 4):  # one game after the checkpoint of iteration 2
        assert main(call) == 130
    assert {record.epoch for record in read_run(home / "run-broken")} == {1, 2, 3}
    assert "continues after epoch 2, but" in refused(capsys, *call, "--record-history", tmp_path / "other")
    home = Path(shutil.move(home, tmp_path / "moved"))
    call[-1] = str(home)
    broken = home / "run-broken"
    assert main(call) == 0
    assert_same_runs(finished, tmp_path / "broken")
    assert [path.name for path in sorted(broken.glob("epoch-*"))] == [f"epoch-{n:06d}.jsonl" for n in (1, 2, 3, 4)]
    for path in whole.glob("epoch-*"):
        assert path.read_text() == (broken / path.name).read_text().replace('"broken"', '"run"')
    assert main(call) == 0  # a run that is over stays as it is
    assert {record.epoch for record in read_run(broken)} == {1, 2, 3, 4}
    elsewhere = arguments("ppo", start, tmp_path / "other" / "broken", "--record-history", str(home))
    assert f"of the run in {tmp_path / 'broken'}" in refused(capsys, *elsewhere)


def test_a_start_that_has_changed_is_refused(start, finished, tmp_path, capsys):
    run, copy = (shutil.copytree(folder, tmp_path / folder.name) for folder in (finished, start))
    shutil.copytree(finished / "model", copy / "model", dirs_exist_ok=True)
    assert "reference" in refused(capsys, *arguments("ppo", copy, run))


class InTurn(TensorDictModuleBase):
    """Guesses four words one after the other, so that a game takes from one to four turns."""

    words = ("crane", "slate", "purge", "mouse")
    in_keys, out_keys = ("agent_mask",), ("action", "token_log_prob", "state_value")

    def forward(self, td):
        end = wordle_tokenizer().control.end_of_action
        guesses = torch.tensor([[*(ord(letter) - ord("a") for letter in word), end] for word in self.words])
        action = guesses[td["agent_mask"].sum(-1) // 6]
        figure = torch.zeros(action.shape)
        return td.set("action", action).set("token_log_prob", figure).set("state_value", figure)


def in_turn(**options):
    task = WordleTask(InTurn.words)
    return Games(task, InTurn(), kind="single", workers=1, seed=3, device=torch.device("cpu"), **options)


@pytest.mark.parametrize("turns", [1, 3])
def test_games_are_played_to_their_end_and_none_beyond(turns):
    """Rows are as long in the mean as the games that begin in the usual turns: they are those games."""
    games, env = in_turn(games=16, turns=turns), WordleTask(InTurn.words).env(16)
    for step in range(2):
        games.restart(step)
        env.set_seed(3 + step)
        rollout = env.rollout(turns + 4, InTurn(), break_when_any_done=False)["next"]
        done = rollout["done"].squeeze(-1)
        late = done & (torch.arange(turns + 4) >= turns - 1)  # the first of them ends a game that began in time
        begun = rollout["tokens"][done & (late.cumsum(1) <= 1)]
        rows = games.play(to_end=True).rows["tokens"]
        assert 16 <= len(rows) == len(begun)
        assert sorted(rows.tolist()) == sorted(begun.tolist())
    games.close()


def test_games_that_are_too_old_are_left_out_and_others_begun():
    games = in_turn(games=1, turns=2, max_staleness=0)
    dropped = 0
    for step in range(8):
        games.restart(step)
        games.play()
        games.weights_changed()
        played = games.play(to_end=True)
        assert len(played.rows) >= 1
        assert played.staleness == 0
        dropped += played.dropped
    assert dropped > 0
    games.close()


def changed(start, run):
    before, after = weights_of(start), weights_of(run)
    return {key for key in before if key in after and not torch.equal(before[key], after[key])}


def test_adapters_train_beside_frozen_weights(start, finished, tmp_path, capsys):
    """The reference is the model without them, which checkpoints lack; the saved model has them merged."""
    pytest.importorskip("peft")
    run, copy = tmp_path / "run", shutil.copytree(start, tmp_path / "start")
    call = arguments("ppo", copy, run, "--lora-rank", "2", "--lr", "0.01", *SHORT, "--value-warmup", "0")
    assert main(call) == 0
    log = log_of(run)
    assert abs(float(log[0]["kl"])) < 1e-5 < abs(float(log[-1]["kl"]))
    assert changed(start, run)
    assert all("attn" in key or "mlp" in key for key in changed(start, run))
    saved = load_file(run / "checkpoints" / "step-000000002" / "tensors.safetensors")
    assert any("lora_A" in key for key in saved)
    assert not any("base_layer" in key or "wte" in key for key in saved)
    shutil.copytree(finished / "model", copy / "model", dirs_exist_ok=True)
    assert "made beside other frozen weights" in refused(capsys, *call)


def test_only_the_top_trains_in_half_precision(start, tmp_path):
    """Acting, the reference and learning compute alike, so the policy starts at its reference."""
    run = tmp_path / "run"
    call = arguments("ppo", start, run, "--top-layers", "1", "--accumulate", "2", "--bf16", *SHORT)
    assert main([*call, "--value-warmup", "0"]) == 0
    assert changed(start, run)
    assert not any(".h.0." in key or "wte" in key or "wpe" in key for key in changed(start, run))
    log = log_of(run)
    assert abs(float(log[0]["kl"])) < 0.05
    assert all(float(row["ESS"]) > 0.9 for row in log)


def test_examples_are_played_and_not_learned(start):
    options = PPO(start=start, out=Path("unused"), examples=0.4, games=64, turns=6)
    begun = load_initial_policy(options)
    kl = kl_transform(options, begun)
    run = OnlineRun(options, begun, kl, PPOLearner(options, begun))
    with torch.no_grad():
        for parameter in begun.policy.decoder.actor.parameters():
            parameter.mul_(1.1)  # away from the start, so that there is something to pay for
    with closing(run.games):
        rows = run.learner.choose(kl(run.games.play(to_end=True).rows))
    written, learned = rows["agent_mask"], rows["train_mask"]
    shown = written & ~learned
    assert not (learned & ~written).any()
    assert 0.3 < shown.sum() / written.sum() < 0.5
    assert (rows["token_log_prob"][learned] != 0).double().mean() > 0.8  # the sixth token is always the end
    assert (rows["token_log_prob"][shown] == 0).all()
    assert (rows["kl"][learned] != 0).any()
    assert (rows["kl"][shown] == 0).all()
    assert rows["advantage"].isfinite().all()


def test_archer_trains_its_critic_first_and_keeps_games(start):
    """The policy waits for the critic; games are kept with the rewards that they had before the KL penalty."""
    sizes = {"games": 8, "turns": 6, "batch_size": 4, "iterations": 6, "value_warmup": 1}
    options = ArCHer(start=start, out=Path("unused"), **sizes, value_steps=2, replay=20, draws=5, lr=0.01)
    begun = load_initial_policy(options)
    kl = kl_transform(options, begun)
    learner = ArCHerLearner(options, begun, kl.controller)
    run = OnlineRun(options, begun, kl, learner)
    state = lambda module: {name: value.clone() for name, value in module.state_dict().items()}  # noqa: E731
    moved = []
    with closing(run.games):
        for iteration in (1, 2, 3):
            before = state(begun.lm), state(learner.state)
            figures = run.iterate(iteration)
            after = begun.lm.state_dict(), learner.state.state_dict()
            moved.append([any((x[key] != y[key]).any() for key in x) for x, y in zip(before, after, strict=True)])
            assert figures["learned_from"] == (0 if iteration == 1 else 5)
            assert figures["critic_loss"] > 0
    assert moved == [[False, True], [True, True], [True, True]]
    assert len(learner.pool) == 20
    reward = learner.pool.rows["token_reward"]
    assert (reward == reward.round()).all()  # of Wordle
    assert abs(figures["kl"]) > 1e-4


def test_normalized_values_begin_at_the_mean_return(start, tmp_path):
    """The log has the explained variance of the values before the updates of an iteration."""
    run = tmp_path / "run"
    assert main(arguments("ppo", start, run, "--normalize-states", "--clip-heads", *SHORT)) == 0
    first, second = log_of(run)
    assert abs(float(first["explained_variance"])) < 1e-4  # they are alike
    assert float(second["explained_variance"]) != 0
    assert float(first["grad_norm_apart"]) > 0
    head = load_run(run).model.heads["value"]
    assert head.normalize
    assert abs(head.out_bias.item() - float(first["return"])) < 0.5


def test_workers_play_with_the_weights_of_the_learner(start, tmp_path):
    """Each row has the age of the weights that played it; some turns are those of a random player."""
    run = tmp_path / "run"
    more = ["--collector", "async", "--max-staleness", "3", "--examples", "0.3"]
    call = arguments("ppo", start, run, *more, "--value-warmup", "0", "--lr", "0.01")
    with interrupted_at(Games, "play", 4):
        assert main(call) == 130
    assert main(call) == 0
    assert_learned_of(log_of(run))
    assert [row["step"] for row in log_of(run)] == ["1", "2", "3", "4"]
    assert not workers_of(os.getpid())


def assert_learned_of(log):
    assert abs(float(log[0]["kl"])) < 1e-4
    assert any(abs(float(row["kl"])) > 1e-4 for row in log)
    assert all(0 <= float(row["staleness"]) <= 6 for row in log)


def test_a_worker_that_is_killed_ends_the_run_with_a_message(start, tmp_path):
    """Nobody is left behind, and the same command goes on."""
    run = tmp_path / "run"
    moving = ["--lr", "0.01", "--value-warmup", "0", "--eval-every", "5"]
    long = arguments("ppo", start, run, "--collector", "async", "--iterations", "4000", *moving)
    process = Program("-m", "torchrl_lang", *long)
    wait_until(lambda: checkpoints(run))
    workers = workers_of(process.pid)
    assert len(workers) == 2
    names = shared_names(process.pid, workers)
    os.kill(workers[0], signal.SIGKILL)
    assert process.wait() == 2
    assert "torchrl_lang: A worker that played games has died" in process.stderr
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert not listed(names)
    assert_learned_of(log_of(run))
    assert max(int(path.name.split("-")[1]) for path in checkpoints(run)) >= 2
    assert not list(run.rglob("*.tmp")) + list(run.rglob("*.writing"))


def test_a_slow_learner_loses_no_turns(start):
    """Workers whose batches wait for over a second deliver them nevertheless."""
    begun = load_initial_policy(PPO(start=start, out=Path("unused"), collector="async"))
    options = {"workers": 2, "games": 16, "turns": 1, "seed": 0, "device": torch.device("cpu")}
    with closing(Games(begun.task, begun.policy, kind="async", **options)) as games:
        for pause in (0.0, 1.2, 1.2):
            time.sleep(pause)
            assert error(begun, games.play().rows) < 1e-3


def test_workers_do_not_see_weights_that_nobody_sent(start):
    """Half of an optimizer step must not be visible in the workers."""

    def multiply(factor):
        with torch.no_grad():
            for parameter in begun.lm.parameters():
                parameter.mul_(factor)

    begun = load_initial_policy(PPO(start=start, out=Path("unused"), collector="sync"))
    options = {"kind": "sync", "workers": 2, "games": 16, "turns": 3, "seed": 0, "device": torch.device("cpu")}
    with closing(Games(begun.task, begun.policy, **options)) as games:
        multiply(0.9)  # as a checkpoint does that is restored before anybody plays
        assert error(begun, games.play().rows) < 1e-3
        multiply(1.5)
        assert error(begun, [games.play() for _ in range(3)][-1].rows) > 0.05  # sampled with the earlier weights
        games.weights_changed()
        assert error(begun, [games.play() for _ in range(4)][-1].rows) < 1e-3


def error(begun, rows):
    return (row_log_prob(begun.policy, rows).detach() - rows["token_log_prob"]).abs().max()
