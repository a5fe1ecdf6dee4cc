"""The tables beside published ones: what is trained, and the results of a small run."""

import json

from benchmarks import published
from benchmarks.published import Setting, planned
from benchmarks.wordle_table import collect
from torchrl_lang.__main__ import main
from torchrl_lang.recipes import compare

SMALL = {"steps": 2, "layers": 1, "width": 16, "heads": 2, "batch-size": 4, "eval-every": 2, "eval-games": 4}


def test_methods_with_values_have_options_of_their_own(tmp_path):
    setting, home = Setting("maze", {"steps": 2}, {"beta": 1}, {"expectile": 0.9}), tmp_path / "maze-3"
    runs = planned(setting, home, ["BC", "Monte-Carlo returns", "ILQL"], 3)
    assert [run.method for run in runs] == ["ilql", "monte-carlo", "bc"]
    assert runs[0].command()[:4] == ["train", "ilql", "--out", str(home / "ilql")]
    shared = {"steps": 2, "data": home / "data", "seed": 3}
    assert [run.options for run in runs] == [shared | {"beta": 1, "expectile": 0.9}, shared | {"beta": 1}, shared]


def test_a_small_table(tmp_path, monkeypatch, capsys):
    small = Setting("maze --games 40", SMALL, {"beta": 1}, {}, choice_games=4, report_games=6)
    monkeypatch.setitem(published.TASKS, "maze", small)
    monkeypatch.setattr(published, "RESULTS", tmp_path)
    for module in (published, compare):  # no processes of their own, which take long to begin
        monkeypatch.setattr(module, "run_in_parallel", lambda commands: [main(words) for words in commands.values()])
    published.main(["--out", str(tmp_path), "--tasks", "maze", "--methods", "ILQL", "--seeds", "1"])
    returns = json.loads((tmp_path / "published_maze.json").read_text())["returns"]
    assert returns["ILQL"] == dict(collect(tmp_path))["maze"]["ILQL"]
    assert -404 <= returns["ILQL"][0] <= returns["optimum"][0] < 0
    assert "BC" not in returns
    assert f"{returns['data'][0]:.2f}" in capsys.readouterr().out
