"""What comparisons of methods share: options that results go together with, and players that do nothing twice."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.recipes.commands import refused
from torchrl_lang._files import FileError
from torchrl_lang.evaluation import Summary
from torchrl_lang.recipes import demo
from torchrl_lang.recipes.compare import CHOICE, REPORT, Row, TrainedPlayer, compared, decodings, format_rows
from torchrl_lang.recipes.demo_options import ComparisonOptions
from torchrl_lang.recipes.load_run import load_run


class Counter(TrainedPlayer):
    """Its policies are numbers; it remembers what it was asked for."""

    asked: list = []  # of all instances

    def ways(self):
        yield from (("greedy, beta 1", 1), ("sampled at 0.5", 2))

    def play(self, policy, place):
        self.asked.append((policy, place))
        return Summary("", 10, float(policy), 0.5, 0.25, 0.1, 3.0, {2: 5})

    def choose(self, found):
        return max(found, key=lambda name: found[name].mean_return)


def test_a_player_measures_and_plays_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Counter, "asked", [])
    for _ in range(2):
        row = compared([Counter(tmp_path / "run", "bc", tmp_path, 0)])
        assert (row.title, row.decodings, row.summary.mean_return) == ("BC", ["sampled at 0.5"], 2.0)
        assert row.summary.guesses == {2: 5}
        assert Counter.asked == [(1, CHOICE), (2, CHOICE), (2, REPORT)]
    assert {path.name for path in tmp_path.iterdir()} == {"choice.json", "test.json"}
    content = (tmp_path / "test.json").read_text()
    for damaged in ("{", content.replace("2.0", "7.0"), '{"a": {}}'):
        (tmp_path / "test.json").write_text(damaged)
        with pytest.raises(FileError, match=r"test.json .*delete it: the games are played again"):
            _ = Counter(tmp_path / "run", "bc", tmp_path, 0).reported


def test_several_seeds_worked_out_by_hand():
    seeds = [
        Summary("", 50, reward, 0.5, won, 0.1, turns, entropy=0.5, metrics={"harmful": 1 - won})
        for reward, won, turns in ((-4.5, 0.5, 2.0), (-2.0, 0.7, 3.0))
    ]
    row = Row("BC", seeds, ["greedy", "sampled at 1"])
    found = row.summary
    assert (found.name, found.games, found.mean_return, found.return_error) == ("BC", 100, -3.25, 1.25)
    assert (found.win_rate, found.mean_turns, found.entropy) == pytest.approx((0.6, 2.5, 0.5))
    assert found.win_error == pytest.approx((0.6 * 0.4 / 100) ** 0.5)
    assert found.metrics == pytest.approx({"harmful": 0.4})
    assert "-4.50, -2.00" in format_rows([row])
    assert [each["mean_return"] for each in row.as_dict()["seeds"]] == [-4.5, -2.0]
    assert "-4.50" not in format_rows([Row("BC", [found])])


def test_each_kind_of_run_is_decoded_in_its_own_ways(walks):
    names = ("bc", "oreo", "dt", "ilql", "psi", "qsft", "chai", "utterance-ilql")
    ways = {name: [way for way, _ in decodings(load_run(walks / name), temperatures=(0.5,))] for name in names}
    assert ways["bc"] == ways["oreo"] == ["greedy", "sampled at 0.5"]
    usual = ["greedy", "sampled at 0.2", "sampled at 0.5", "sampled at 1"]
    assert [way for way, _ in decodings(load_run(walks / "bc"))] == usual
    assert ways["ilql"] == [f"greedy, beta {beta}" for beta in (1, 2, 4, 8, 16)]
    assert ways["psi"] == ["greedy, beta 1"]
    assert ways["qsft"] == [f"greedy, beta {beta}" for beta in (4, 8, 16, 32, 64)]
    assert ways["chai"] == ways["utterance-ilql"] == ["best of 4", "best of 8", "best of 16"]
    assert len(ways["dt"]) in (2, 4)
    assert all(", return -" in way for way in ways["dt"])
    run = load_run(walks / "ilql")
    assert [way for way, _ in decodings(run, by_values=False, temperatures=(1.0,))] == ["greedy", "sampled at 1"]
    guided = dict(decodings(run, betas=(3.0,), guided_temperatures=(0.5,), min_p=0.1))
    assert list(guided) == ["greedy, beta 3", "sampled at 0.5, beta 3"]
    assert {policy.decoder.rule.min_p for policy in guided.values()} == {0.1}


def test_results_of_other_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ComparisonOptions(out=tmp_path / "out", folder=Path("data"), steps=5)
    options.record()
    options.record()
    changed = {"folder": tmp_path / "data", "methods": ("chai",), "seeds": 3}
    ComparisonOptions(out=tmp_path / "out", steps=5, **changed).record()
    longer = ComparisonOptions(out=tmp_path / "out", folder=Path("data"), steps=6)
    with pytest.raises(ValueError, match="holds a run with other options: --steps was 5 and is 6"):
        longer.record()
    longer.record("steps")
    assert json.loads((tmp_path / "out" / "options.json").read_text())["steps"] == 6
    with pytest.raises(ValueError, match="--methods has no magic"):
        ComparisonOptions(out=tmp_path, methods=("bc", "magic"))


@pytest.mark.parametrize("demo", ["reddit", "visual_dialogue"])
def test_a_folder_that_is_not_there_is_an_error(demo, tmp_path, capsys):
    assert "mistyped" in refused(capsys, demo, "--out", tmp_path / "out", "--folder", tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()
    assert not list((tmp_path / "out").glob("*.json")), "the corrected command can use the folder"


def test_the_game_that_the_demo_draws_is_the_one_closest_to_the_mean_lengths(monkeypatch):
    turns = {"BC, sampled at 1": [2, 4, 3], "BC, greedy": [6, 4, 2], "ILQL": [1, 3, 5]}  # means 3, 4, 3
    games = {
        name: SimpleNamespace(turns=torch.tensor(each), returns=-torch.tensor(each)) for name, each in turns.items()
    }
    part, drawn, panels = SimpleNamespace(records=games, best=lambda name: "BC, greedy", ilql="ILQL"), [], [Mock()] * 3
    monkeypatch.setattr(demo, "_draw_game", lambda panel, records, game: drawn.append(game))
    demo.draw_tiles(part, panels)
    assert drawn == [1, 1, 1]
    assert panels[0].set_title.call_args.args == ("ILQL: return -3",)
