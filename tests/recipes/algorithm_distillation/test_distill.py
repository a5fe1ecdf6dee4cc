"""`distill` from end to end: what it trains, what it plays on unseen tasks, and what it reports."""

import importlib
import json
import shutil

import pytest
import torch

from tests.recipes.commands import Trainings, words_of
from torchrl_lang.__main__ import main
from torchrl_lang.algorithm_distillation import RandomPolicy, episode_returns, record_history
from torchrl_lang.algorithm_distillation.sources import LinearDecay, QLearning
from torchrl_lang.recipes.algorithm_distillation.distill import Distill, TestPlay, format_report, reports
from torchrl_lang.recipes.algorithm_distillation.histories import HistoryOptions, TaskFamily, source_on
from torchrl_lang.recipes.algorithm_distillation.options import FormatOptions

# The package has the function of that name.
recipe = importlib.import_module("torchrl_lang.recipes.algorithm_distillation.distill")
SIZES = {"size": 3, "episode-length": 4, "test": 0.3, "episodes": 6, "seeds": 2, "steps": 1, "streams": 4}
SIZES |= {"test-streams": 3, "context-episodes": 2, "width": 8, "heads": 2, "layers": 1}
RUNS = {"ad-0", "ad-1", "ed-0", "ed-1"}
POLICIES = ["AD", "AD, prompted", "ED", "source", "random", "optimal"]
FAMILY = {"size": 3, "episode_length": 4, "test": 0.3}


def distill(out, *more):
    return main(["distill", "--quick", "--symmetries", "--out", str(out), *words_of(SIZES), *map(str, more)])


@pytest.fixture
def here(monkeypatch):
    """What was trained; it was trained in this process."""
    found = Trainings()
    found.take_over(monkeypatch, recipe)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A demo from end to end; tests must not write into it."""
    out = tmp_path_factory.mktemp("distill") / "out"
    with pytest.MonkeyPatch.context() as patch:
        Trainings().take_over(patch, recipe)
        assert distill(out) == 0
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "out")


def split():
    return TaskFamily(HistoryOptions(**FAMILY)).split


def table_of(text):
    """The rows of the first table by policy."""
    lines = text.split("\n\n")[1].splitlines()
    return {line[:14].strip(): line[14:] for line in lines if line[:14].strip() in POLICIES}


@pytest.mark.slow
def test_each_method_trains_on_its_source(finished):
    for name in RUNS:
        config = json.loads((finished / name / "config.json").read_text())
        assert config["source"] == ("expert" if name.startswith("ed") else None)
        assert (config["seed"], config["steps"], config["size"]) == (int(name[-1]), 1, 3)
        assert config["symmetries"] is True
        about = json.loads((finished / name / "model" / "ad_model.json").read_text())["trained_on"]
        assert about["source"] == ("expert" if name.startswith("ed") else "posterior")
        assert about["family"]["test"] == split().test.tolist()


@pytest.mark.slow
def test_figures_by_plain_loops(finished):
    results, table = json.loads((finished / "results.json").read_text()), (finished / "report.txt").read_text()
    env = TaskFamily(HistoryOptions(**FAMILY)).env(split().test, 3)
    optimal = env.optimal_return()[:, 0].tolist()
    files = {"AD": "ad-{}/test.json", "AD, prompted": "ad-{}/test_prompted.json", "ED": "ed-{}/test.json"}
    for title, file in files.items():
        returns = [json.loads((finished / file.format(seed)).read_text())["returns"] for seed in range(2)]
        streams = [(task, stream) for one in returns for task, row in enumerate(one) for stream in row]
        late = [sum(stream[-3:]) / 3 for _, stream in streams]
        share = sum(late) / len(late) / (sum(optimal) / len(optimal))
        found = results[title]
        assert found["share_of_optimal"]["mean"] == pytest.approx(share)
        assert found["mean"][0] == pytest.approx(sum(stream[0] for _, stream in streams) / len(streams))
        assert found["never_found"] == pytest.approx(sum(not any(stream) for _, stream in streams) / len(streams))
        by_task = [
            sum(value for value, (task, _) in zip(late, streams, strict=True) if task == number) / 6 / optimal[number]
            for number in range(2)
        ]
        assert found["worst_task"]["last"] / found["worst_task"]["optimal"] == pytest.approx(min(by_task))
        cells = table_of(table)[title]
        assert f"{100 * share:.1f} ± " in cells
        assert f" {sum(late) / len(late):.2f} " in cells


@pytest.mark.slow
def test_a_second_call_trains_what_is_missing_and_prints_the_same(copied, here, capsys):
    report, files = (copied / "report.txt").read_text(), sorted(copied.glob("*/test*.json"))
    times = [path.stat().st_mtime_ns for path in files]
    assert len(files) == 6
    capsys.readouterr()
    shutil.rmtree(copied / "ed-0")
    assert distill(copied) == 0
    assert here.done == ["ed-0"]
    assert (copied / "report.txt").read_text() == report
    assert report in capsys.readouterr().out
    kept = [(path, time) for path, time in zip(files, times, strict=True) if path.parent.name != "ed-0"]
    assert [(path, path.stat().st_mtime_ns) for path, _ in kept] == kept


@pytest.mark.slow
def test_other_options_are_refused(finished, here, capsys):
    for more in (["--steps", "5"], ["--source", "noise"]):
        assert distill(finished, *more) == 2
        assert "other options" in capsys.readouterr().err.splitlines()[-1]
    assert here.done == []


def test_quick_values_and_what_was_given():
    quick = Distill.from_given({"quick": True, "steps": 7})
    assert (quick.size, quick.episodes, quick.seeds, quick.steps) == (7, 30, 3, 7)
    plain = Distill.from_given({})
    assert (plain.size, plain.episodes, plain.seeds, plain.steps) == (9, 40, 5, 2000)


def test_demonstrations_are_half_an_episode_of_each_stream_of_an_expert():
    play = TestPlay(FormatOptions(size=5), episodes=6, streams=3)
    steps, test = play._demonstration(0), TaskFamily(HistoryOptions(size=5)).split.test.tolist()
    assert steps.shape == (len(test) * 3, 10)
    for number, row in enumerate(steps.unbind(0)):
        goal = divmod(test[number // 3], 5)
        away = [abs(r - goal[0]) + abs(c - goal[1]) for r, c in row["observation"].tolist()]
        assert away == [max(away[0] - t, 0) for t in range(10)]


@pytest.mark.parametrize(("source", "history", "every"), [("noise", 28, 4), ("q_learning", 8, 4), ("q_learning", 5, 1)])
def test_the_source_plays_the_episodes_that_histories_keep(source, history, every):
    """Of a history that is shorter or longer than the report: the first episodes are those of the history."""
    options = FormatOptions(size=3, source=source, episode_length=5, history_episodes=history, skip_episodes=every)
    play = TestPlay(options, episodes=6, streams=2)
    returns = play.of_source()
    reward = source_on(options, play.env(), seed=2_000_000).history()["reward"].squeeze(-1)
    expected = reward.unflatten(-1, (history, 5)).sum(-1)[..., ::every][..., :6]
    assert returns.shape[-1] == 6
    assert torch.equal(returns[..., : expected.shape[-1]], expected)


def test_the_source_of_a_recorded_history_has_its_settings(tmp_path):
    """Its length, its noise and its other numbers, not those of new histories."""
    family = {"size": 3, "source": "q_learning", "skip_episodes": 1}
    env = TestPlay(FormatOptions(**family), 6, 2).env()
    settings = {"learning_rate": 0.1, "gamma": 0.5, "decay": LinearDecay(0.9, 0.2, (0.25, 0.5))}
    recorded = record_history(tmp_path / "history", QLearning(env, 200, seed=2_000_000, **settings))
    test = env.fixed_task[:, 0].tolist()
    assert recorded.task_numbers.tolist() == test
    returns = TestPlay(FormatOptions(**family, history=tmp_path / "history"), 12, 2).of_source()
    assert torch.equal(returns[..., :10], episode_returns(recorded.steps, 10))


def test_regret_of_a_bandit_beside_its_source_and_random_pulls():
    options = FormatOptions(env="bandit", tasks=40, arms=5)
    play = TestPlay(options, episodes=6, streams=20)
    found = reports(play, {})
    best = play.env().optimal_return()[:, 0].double()
    for name, returns in (("source", play.of_source()), ("random", play.returns(RandomPolicy(5), play.env()))):
        expected = 6 * best.mean() - returns.double().sum(-1).mean()
        assert found[name].regret[-1] == pytest.approx(float(expected))
        assert found[name].total_regret.values == (pytest.approx(float(expected)),)
        assert f" {float(expected):.1f} " in table_of(format_report(found))[name]
    assert found["source"].regret[-1] < 0.8 * found["random"].regret[-1]
    assert abs(found["optimal"].regret[-1]) < 1  # its pulls are random too
