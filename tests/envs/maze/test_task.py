"""The maze as a task of the recipes: scripted players, scores, data, and a policy that learns it."""

from pathlib import Path

import pytest

from tests.recipes.commands import from_own_notes
from torchrl_lang._files import FileError
from torchrl_lang.envs.maze.task import MazeTask, normalized_return
from torchrl_lang.recipes.algorithms import BC, train
from torchrl_lang.recipes.datasets import generate_once
from torchrl_lang.recipes.load_run import load_run
from torchrl_lang.recipes.tasks.maze import MazeData


def test_the_score_of_lmrl_gym():
    """Figures of its tables: ILQL with -52.9 has 76.3, PPO with -6.84 would have 100."""
    assert normalized_return(-52.9, "partial") == pytest.approx(76.3, abs=0.05)
    assert [normalized_return(value, "full") for value in (-101.0, -92.0, -83.0)] == [0, 25, 50]
    assert normalized_return(-7.24, "partial") == pytest.approx(116.2, abs=0.05)


@pytest.mark.parametrize("observation", ["full", "partial"])
def test_scripted_players_in_a_table(observation):
    task = MazeTask(observation)
    games = task.number_of_games(None)
    played = {
        name: task.evaluate(task.player(name, 0).policy, games=20 * games, seed=0, batch=500)[0]
        for name in task.baselines
    }
    best, worst = played["optimal"], played["random"]
    assert best.metrics["regret"] == pytest.approx(0, abs=1e-9)
    assert best.win_rate == 1
    assert worst.mean_return < -80
    assert set(best.metrics) == set(task.metric_meanings)
    without_memory = {"full": -6.84, "partial": -12.6}[observation]
    assert played["memoryless"].mean_return == pytest.approx(without_memory, abs=1.5)


def test_known_values_of_first_moves():
    task = MazeTask("full")
    env = task.env(25, seed=0)
    states = task.known_values(env.reset())
    near = env.tokenizer.encode(env.maze.text(env.maze.cells.index((7, 6)), "full"))[0]
    known = next(one for one in states if one.tokens[1] == near)
    # Down arrives; up costs 1, and then 1 and 0 to come back; walls cost 1.
    assert (len(states), known.values.tolist()) == (25, [-1.0, -1.0, -2.0, 0.0])
    assert env.tokenizer.decode(known.utterances[3].tolist()) == "move down"


@pytest.mark.parametrize("change", [{"observation": "none"}, {"max_moves": 0}])
def test_damaged_notes(change):
    assert from_own_notes(MazeTask("full", 7)) == MazeTask("full", 7)
    with pytest.raises(FileError):
        from_own_notes(MazeTask(), **change)


def test_the_data_have_the_mean_return_of_the_published_ones():
    task, options = MazeTask(), MazeData(out=Path("data"))
    returns = task.evaluate(task.behavior_policy(options).policy, games=1000, seed=0, batch=500)[1].returns
    assert abs(returns.mean() + 83) < 4 * returns.std() / 1000**0.5


def test_a_model_that_imitates_the_best_player_has_the_optimum(tmp_path):
    generate_once(MazeData(out=tmp_path / "data", observation="full", player="optimal", games=200))
    options = {"steps": 150, "eval_every": 150, "lr": 5e-3}
    train(BC.for_task(MazeTask, data=tmp_path / "data", out=tmp_path / "bc", **options))
    run = load_run(tmp_path / "bc")
    summary, _ = run.task.evaluate(run.policy(method="greedy"), games=25, seed=0)
    assert summary.mean_return == pytest.approx(-6.84)
    assert summary.metrics["normalized"] == pytest.approx(100)
