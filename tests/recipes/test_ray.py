"""Games on a Ray cluster of two nodes, with real workers."""

import signal
import time
from contextlib import closing

import pytest
import torch

from tests.recipes.commands import log_of, refused
from tests.recipes.games import Corridor, NoGame, Walker
from torchrl_lang.__main__ import main
from torchrl_lang.recipes.collect import Games
from torchrl_lang.recipes.command_line import describe

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address():
    """The head of a cluster of two nodes with a CPU each."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args=node)
        cluster.add_node(**node)
        yield cluster.address
        cluster.shutdown()


def games_of(address, policy, *, task=None, kind="ray", **options):
    sizes = {"workers": 2, "games": 6, "turns": 6, "seed": 0, "device": torch.device("cpu"), **options}
    return closing(Games(task or Corridor(), policy, kind=kind, cluster={"address": address}, **sizes))


def test_two_workers_learn_a_corridor_from_rows_like_those_of_one_process(address):
    """Rows have the probabilities of the weights that played them, of which the oldest are left out."""
    walker = Walker(0.0)
    with games_of(address, walker, kind="single") as games:
        expected = games.play().rows
    handler = signal.getsignal(signal.SIGTERM)
    optimizer = torch.optim.SGD(walker.parameters(), lr=4.0)
    chances, returns, dropped, pids = [0.5], [], 0, set()
    with games_of(address, walker, max_staleness=1) as games:
        while len(pids) < 2:  # until both have begun
            pids |= set(games.play().rows["state_value"].amax(-1).tolist())
        for _ in range(12):
            played = games.play()
            rows = played.rows
            dropped += played.dropped
            moves = (rows["tokens"][..., None] == walker.letters) & rows["agent_mask"][..., None]
            chance = torch.tensor(chances[-2:])
            known = torch.stack([1 - chance, chance]).log()  # [left or right, which weights]
            error = (rows["token_log_prob"][..., None, None] - known).abs().amin(-1)[moves]
            assert error.max() < 1e-5
            gain = rows["token_reward"].sum(-1)
            returns.append(float(gain.mean()))
            loss = -((gain - gain.mean()) * (moves.sum(1) * walker.log_probs()).sum(-1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            chances.append(float(walker.logit.detach().sigmoid()))
            games.weights_changed()
    assert dropped
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not ray.is_initialized()
    assert rows.keys() == expected.keys()
    for key in rows.keys():
        assert (rows[key].dtype, rows[key].shape[1:]) == (expected[key].dtype, expected[key].shape[1:]), key
    assert sum(returns[-3:]) / 3 > sum(returns[:3]) / 3 + 1


def test_a_worker_that_is_killed_is_replaced_and_its_finished_games_arrive(address, tmp_path, monkeypatch):
    """It has three games, each of two turns, and dies in its tenth turn. Later, three that replace it are born dead."""
    walker = Walker(30.0, flag=str(tmp_path / "died"), slow=0.02)
    found, until = [], time.monotonic() + 120
    with games_of(address, walker, workers=1, games=3) as games:

        def play_until_two_have():
            while len({*found}) < 2:
                found.extend(games.play().rows["state_value"].amax(-1).tolist())
                assert time.monotonic() < until

        with pytest.warns(UserWarning, match="A Ray worker has died and is replaced: The actor is dead"):
            play_until_two_have()
        assert found.count(int((tmp_path / "died").read_text())) == 3 * 4
        start, [place] = games._collector._start, games._collector._playing.values()
        seeds = []

        def start_dead(*parts):
            seeds.append(parts[-1])
            worker = start(*parts)
            ray.kill(worker)
            return worker

        monkeypatch.setattr(games._collector, "_start", start_dead)
        ray.kill(place.worker)

        def play_on():
            while True:  # what had been played arrives first
                games.play()

        with pytest.warns(UserWarning, match="is replaced") as warned, pytest.raises(ChildProcessError) as error:
            play_on()
        assert len(warned) == 2
        assert seeds == [3, 4]  # after those of the first two
        assert "A Ray worker has died 3 times in a row: The actor never ran" in describe(error.value)


def test_what_goes_wrong_ends_in_a_line(address):
    with games_of(address, Walker(0.0), task=NoGame(), workers=1) as games, pytest.raises(ChildProcessError) as error:
        games.play()
    assert "failed: KeyError: 'the level' (" in describe(error.value)
    assert "games.py, line" in describe(error.value)
    with games_of(address, Walker(0.0), workers=3) as games, pytest.raises(ValueError, match="--workers 3 need 3 CPUs"):
        games.play()
    with games_of("127.0.0.1:9", Walker(0.0)) as games, pytest.raises(ConnectionError, match="no Ray cluster at 127"):
        games.play()


def test_a_run_on_a_cluster(address, wordle, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    ppo = ["train", "ppo", "--start", wordle / "bc", "--out", run, "--collector", "ray", "--ray-address", address]
    small = ["--workers", "1", "--games", "8", "--turns", "3", "--iterations", "3", "--eval-games", "4"]
    small += ["--value-warmup", "0", "--lr", "0.01"]
    assert "leave out --collector ray" in refused(capsys, *ppo, "--curriculum", "4")
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "0")
        assert "--collector ray plays for one learner" in refused(capsys, *ppo)
    assert main([str(word) for word in [*ppo, *small]]) == 0
    log = log_of(run)
    assert abs(float(log[0]["kl"])) < 1e-4 < abs(float(log[2]["kl"]))
    assert all(line.startswith("run: ") for line in "".join(capsys.readouterr()).splitlines())
