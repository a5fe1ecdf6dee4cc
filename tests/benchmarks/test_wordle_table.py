"""The table of Wordle experiments: what is missing is run, what is there is kept, gaps are shown."""

import json
from pathlib import Path

import pytest

from benchmarks import wordle_table
from benchmarks.wordle_table import NAMES, QUICK, REPORT, collect, place, run, summaries, text
from torchrl_lang.recipes import compare
from torchrl_lang.recipes.compare import decodings
from torchrl_lang.recipes.demo_options import METHODS
from torchrl_lang.recipes.load_run import load_run

TINY = QUICK._replace(words=4, games=60, steps=2, choice_games=4, report_games=8, width=8)


def test_what_is_missing_is_run_and_gaps_are_shown(tmp_path, monkeypatch):
    commands = []

    def in_process(waiting):
        from torchrl_lang.__main__ import main

        commands.append([Path(name).name for name in waiting])
        for words in waiting.values():
            assert main(words) == 0

    monkeypatch.setattr(compare, "run_in_parallel", in_process)
    run(TINY, tmp_path, ["mediocre"], ["BC"], 2)
    first = (tmp_path / "mediocre-0" / "bc" / "score.json").read_text()
    results = run(TINY, tmp_path, ["mediocre"], ["BC", "ILQL"], 1)
    assert commands == [["bc"], ["bc"], ["ilql"]]
    assert (tmp_path / "mediocre-0" / "bc" / "score.json").read_text() == first
    players = results["returns"]["mediocre"]
    assert players["ILQL"][1] is None
    assert players["BC"] == [json.loads(first)["return"], players["BC"][1]]
    assert players["BC: decoding"][0] in ("greedy", "sampled at 0.2", "sampled at 0.5", "sampled at 1")
    assert players["ILQL: decoding"][0].startswith("greedy, beta ")
    assert json.loads(json.dumps(results))["returns"] == dict(collect(tmp_path))
    for method in ("BC", "ILQL"):  # the reported games are others than those of the choice
        finished = load_run(tmp_path / "mediocre-0" / place(method))
        policies = dict(decodings(finished, by_values=METHODS[NAMES[method]].by_values))
        chosen = policies[players[f"{method}: decoding"][0]]
        assert players[method][0] == finished.task.evaluate(chosen, games=8, seed=REPORT)[0].mean_return, method
    shown = text(results)
    assert "not run with every seed: BC best 30 %" in shown
    assert [len(one.values) for one in summaries(players)] == [2, 2, 1, 2]  # data, BC, ILQL, optimal
    scaled = {one.name: one for one in summaries(players, normalised=True)}
    assert scaled["data"].values == pytest.approx((50, 50))
    assert scaled["optimal (myopic)"].values == pytest.approx((100, 100))


def test_runs_without_the_returns_of_their_data_are_gaps(tmp_path):
    """A call that was killed has scored a method and not yet the scripted players."""
    for seed, value in enumerate((-2.0, -2.5)):
        (tmp_path / f"mediocre-{seed}" / "bc").mkdir(parents=True)
        score = {"decoding": "greedy", "return": value}
        (tmp_path / f"mediocre-{seed}" / "bc" / "score.json").write_text(json.dumps(score))
    assert summaries(dict(collect(tmp_path))["mediocre"], normalised=True) == []
    scripted = {"data": -3.0, "optimal (myopic)": -1.0}
    (tmp_path / "mediocre-0" / "scripted.json").write_text(json.dumps(scripted))
    players = dict(collect(tmp_path))["mediocre"]
    assert [one.values for one in summaries(players)] == [(-3,), (-2, -2.5), (-1,)]
    assert [one.values for one in summaries(players, normalised=True)] == [(50,), (75,), (100,)]
    shown = text({"returns": {"mediocre": players}})
    assert "not run with every seed: data, " in shown
    assert "not normalised with every seed: BC" in shown


@pytest.mark.parametrize("method", [method.title for method in METHODS.values() if method.start is not None])
def test_the_run_that_a_method_starts_from_is_trained(tmp_path, monkeypatch, method):
    commands = []
    monkeypatch.setattr(compare, "run_in_parallel", commands.append)
    wordle_table.train(TINY, tmp_path, "mediocre", [method], 0)
    first, second = commands
    assert list(first) == [str(tmp_path / "bc")]
    assert second[str(tmp_path / place(method))][-2:] == ["--start", str(tmp_path / "bc")]
