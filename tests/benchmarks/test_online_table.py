"""The table of online methods: lengths that fit a budget, commands that exist, figures from logs."""

import pytest

from benchmarks.online_table import METHODS, NO_KL, TRIAL, Task, _command, _log, iterations, place, text
from torchrl_lang.__main__ import main

HEADER = "step,return,games,seconds_processor,eval_return\n"


def test_a_run_has_as_many_iterations_as_its_later_iterations_took_time(tmp_path):
    rows = [f"{step},-3.0,64,{1.0 if step <= TRIAL // 2 else 2.0},\n" for step in range(1, TRIAL + 1)]
    (tmp_path / "log.csv").write_text(HEADER + "".join(rows) + f"{TRIAL},,,,-2.0\n")
    assert iterations(tmp_path, minutes=1) == 30
    assert _log(tmp_path)["games"] == [64] * TRIAL  # not the evaluation


@pytest.mark.parametrize("method", METHODS)
def test_a_command_is_one_of_the_command_line(tmp_path, capsys, method):
    words = _command(Task("", "", NO_KL), tmp_path, place(tmp_path, method, 9, 0))
    assert main([str(word) for word in words]) == 2
    assert "There is no run in" in capsys.readouterr().err


def test_a_table_has_each_way_to_decode():
    curve = {"games": [64.0, 128.0], "minutes": [0.1, 0.2], "return": [-4.0, -3.0]}
    returns = [{"sampled": -2.0, "greedy": -1.5, "won": 1.0}, {"sampled": -3.0, "greedy": -2.5, "won": 0.5}]
    found = [{**each, "curve": curve} for each in returns]
    table = text("wordle", {"start": {"sampled": -5.0}, "methods": {"PPO": found}})
    means = {line.split("  ")[0]: line.split()[2] for line in table.splitlines() if line.startswith("PPO")}
    assert means == {"PPO, sampled": "-2.50", "PPO, greedy": "-2.00"}
    assert "won, sampled, %: PPO 75.0" in table
    assert "games of a run: PPO 128" in table
