"""Figures with their spread, timing in turns, records that remember the last one, and where things run."""

import json
import re
import time

import pytest

from benchmarks.common import Median, along, compared, interleaved, machine, median, ratio, record, row, table


def test_median_and_quartiles_by_hand():
    """A ratio is of neighbouring runs: each round was twice as slow as the one before; the ratios are 2, 3 and 4."""
    for found, numbers in (
        (median([5.0, 1.0, 4.0, 2.0, 3.0]), (3, 2, 4)),
        (ratio({"a": [2.0, 6.0, 16.0], "b": [1.0, 2.0, 4.0]}, "a", "b"), (3, 2.5, 3.5)),
    ):
        assert (float(found), found.low, found.high) == numbers


@pytest.mark.parametrize(("at_most", "ok"), [(True, False), (False, True)])
def test_a_row_meets_its_target_or_does_not(at_most, ok):
    assert row("a", 2.0, "x", 1.0, at_most=at_most)["ok"] is ok
    assert row("a", 2.0, "x", 2.0, at_most=at_most)["ok"] is True
    assert row("a", 2.0, "x", at_most=at_most)["ok"] is None


def test_jobs_take_turns_after_a_run_to_warm_up():
    done = []
    times = interleaved({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, 2)
    assert done == ["a", "b"] * 3
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2}


def test_a_spent_budget_ends_the_rounds_but_for_the_least():
    for rounds, budget, least, done in ((9, 0.0, 3, 3), (9, 0.0, 5, 5), (2, 0.0, 3, 2), (9, 60.0, 3, 9)):
        jobs = {"a": lambda: time.sleep(0.002)}
        assert len(interleaved(jobs, rounds, budget=budget, least=least)["a"]) == done


def test_places_take_turns_like_jobs():
    done = []
    jobs = {place: {name: lambda at=(place, name): done.append(at) for name in "ab"} for place in (1, 2)}
    times = along(jobs, 6, budget=60.0)
    first, second = ([(place, name) for name in "ab"] for place in (1, 2))
    visit = 2 * first + 2 * second  # two rounds of each place
    assert done == first + 2 * first + second + 2 * second + 2 * visit  # in the first visit a run more to warm up
    assert all(len(times[place][name]) == 6 for place in (1, 2) for name in "ab")


def test_a_record_keeps_figures_machine_and_what_stood_there_before(tmp_path):
    path = tmp_path / "folder" / "a.json"
    assert record([row("a", Median(2.0, 1.0, 3.0), "x"), row("gone", 1.0, "x")], path) == {}
    assert record([row("a", 4.0, "x"), row("new", 1.0, "ms")], path) == {"a": 2}
    written = json.loads(path.read_text())
    assert [entry.get("last") for entry in written["rows"]] == [2, None]
    assert (written["machine"], written["changed"]) == (machine(), {})
    written["machine"] |= {"torch": "1.0.0", "cores": 999}
    del written["machine"]["device"]  # an entry that older records lack is no change
    path.write_text(json.dumps(written))
    assert compared([row("a", 3.0, "x")], path)["changed"] == {"torch": "1.0.0", "cores": 999}
    assert json.loads(path.read_text()) == written  # comparing writes nothing


def test_table_shows_spread_verdict_and_the_last_value_beside_each_other():
    rows = [
        row("fast", Median(0.781, 0.742, 0.805), "x", 1.1, at_most=True, note="a busy machine"),
        row("slow", 1234.5, "turns/s", 2000.0),
    ]
    lines = table(rows, {"fast": 1.562}).splitlines()
    assert re.split("  +", lines[1]) == ["fast", "0.781 [0.742, 0.805]", "x", "1.1", "ok", "1.56", "0.50x"]
    assert re.split("  +", lines[2]) == ["slow", "1,234", "turns/s", "2,000", "MISSED"]
    assert lines[3] == "* fast: a busy machine"
