"""Figures with their spread, timing in turns, records that remember the last one, and where things run."""

from __future__ import annotations

import copy
import json
import math
import re
import time

import pytest
import torch

from benchmarks.common import (
    Median,
    along,
    compared,
    device,
    interleaved,
    machine,
    median,
    one_core,
    ratio,
    record,
    row,
    seconds,
    table,
    using,
)
from benchmarks.memory import peak_bytes

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Figures --------------------------------------------------------------------------------------------------------------


def test_median_and_quartiles_by_hand():
    found = median([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (float(found), found.low, found.high) == (3, 2, 4)


def test_median_of_one_value_and_of_a_generator():
    found = median(x for x in [7.0])
    assert (float(found), found.low, found.high) == (7, 7, 7)


def test_a_median_is_a_plain_number_to_everybody_else():
    found = median([1.0, 2.0, 3.0])
    assert found == 2
    assert found <= 2.5
    assert type(found * 1000) is float
    assert f"{found:.3g}" == "2"
    assert json.dumps(found) == "2.0"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_median_keeps_its_spread(copied):
    found = copied(Median(2.0, 1.5, 3.0))
    assert (float(found), found.low, found.high) == (2, 1.5, 3)


def test_ratio_is_of_neighbouring_runs():
    # Each round was twice as slow as the one before; the ratios are 2, 3 and 4.
    found = ratio({"a": [2.0, 6.0, 16.0], "b": [1.0, 2.0, 4.0]}, "a", "b")
    assert (float(found), found.low, found.high) == (3, 2.5, 3.5)


def test_ratio_wants_as_many_runs_of_both():
    with pytest.raises(ValueError, match="shorter"):
        ratio({"a": [1.0, 2.0], "b": [1.0]}, "a", "b")


@pytest.mark.parametrize(("at_most", "ok"), [(True, False), (False, True)])
def test_a_row_meets_its_target_or_does_not(at_most, ok):
    assert row("a", 2.0, "x", 1.0, at_most=at_most)["ok"] is ok
    assert row("a", 2.0, "x", 2.0, at_most=at_most)["ok"] is True
    assert row("a", 2.0, "x", at_most=at_most)["ok"] is None


def test_a_row_brings_the_spread_of_its_median():
    entry = row("a", Median(2.0, 1.5, 3.0), "x")
    assert (entry["value"], entry["low"], entry["high"]) == (2, 1.5, 3)
    assert "low" not in row("a", 2.0, "x")
    assert "low" not in row("a", median([2.0]), "x")  # one run has no spread


# Timing ---------------------------------------------------------------------------------------------------------------


def test_jobs_take_turns_after_a_run_to_warm_up():
    done = []
    times = interleaved({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, 2)
    assert done == ["a", "b"] * 3
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2}


def test_a_spent_budget_ends_the_rounds_but_for_the_least():
    jobs = {"a": lambda: time.sleep(0.002)}
    assert len(interleaved(jobs, 9, budget=0.0)["a"]) == 3
    assert len(interleaved(jobs, 9, budget=0.0, least=5)["a"]) == 5
    assert len(interleaved(jobs, 2, budget=0.0)["a"]) == 2
    assert len(interleaved(jobs, 9, budget=60.0)["a"]) == 9


def test_without_a_warm_up_every_run_counts():
    done = []
    assert len(interleaved({"a": lambda: done.append(1)}, 2, warm_up=False)["a"]) == len(done) == 2


def test_places_take_turns_like_jobs():
    done = []
    jobs = {place: {name: lambda at=(place, name): done.append(at) for name in "ab"} for place in (1, 2)}
    times = along(jobs, 6, budget=60.0)
    first, second = ([(place, name) for name in "ab"] for place in (1, 2))
    visit = 2 * first + 2 * second  # two rounds of each place
    assert done == first + 2 * first + second + 2 * second + 2 * visit  # in the first visit a run more to warm up
    assert {place: {name: len(taken) for name, taken in found.items()} for place, found in times.items()} == {
        1: {"a": 6, "b": 6},
        2: {"a": 6, "b": 6},
    }


def test_a_place_that_takes_long_has_a_round_a_visit():
    times = along({1: {"a": lambda: time.sleep(0.002)}}, 9, budget=0.0)
    assert len(times[1]["a"]) == 3


def test_seconds_of_a_sleep():
    with using(torch.device("cpu")):
        assert 0.02 <= seconds(lambda: time.sleep(0.02)) < 1


@needs_cuda
def test_seconds_wait_for_the_device():
    x = torch.randn(4096, 4096, device="cuda")

    def job(products):
        for _ in range(products):
            x @ x

    with using(torch.device("cuda")):
        times = interleaved({"few": lambda: job(5), "many": lambda: job(50)}, 5)
    assert 5 < ratio(times, "many", "few") < 20


@needs_cuda
def test_peak_bytes_of_a_cuda_device():
    x = torch.zeros(2**20, device="cuda")
    assert peak_bytes(lambda: x + 1 + 1, "cuda") == 2 * x.nbytes
    assert torch.cuda.memory_allocated() >= x.nbytes


def test_one_core_leaves_threads_and_random_numbers_as_they_were():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with one_core():
        assert torch.get_num_threads() == 1
        first = torch.rand(3)
    with one_core():
        assert torch.rand(3).equal(first)
    assert torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(state)


def test_device_is_the_one_in_use_even_after_an_error():
    default = device()
    assert default.type == ("cuda" if torch.cuda.is_available() else "cpu")

    def fail():
        with using(torch.device("cpu")):
            raise RuntimeError

    with using(torch.device("meta")):
        assert device() == torch.device("meta")
        with pytest.raises(RuntimeError):
            fail()
        assert device() == torch.device("meta")
    assert device() == default


# Records --------------------------------------------------------------------------------------------------------------


def test_a_record_keeps_figures_machine_and_what_stood_there_before(tmp_path):
    path = tmp_path / "folder" / "a.json"
    assert record([row("a", Median(2.0, 1.0, 3.0), "x"), row("gone", 1.0, "x")], path) == {}
    assert record([row("a", 4.0, "x"), row("new", 1.0, "ms")], path) == {"a": 2}
    written = json.loads(path.read_text())
    assert written["rows"][0]["last"] == 2
    assert "last" not in written["rows"][1]
    assert written["machine"] == machine()
    assert written["changed"] == {}


def test_a_record_of_another_machine_is_told_apart(tmp_path):
    path = tmp_path / "a.json"
    record([row("a", 2.0, "x")], path)
    old = json.loads(path.read_text())
    old["machine"] |= {"torch": "1.0.0", "cores": 999}
    del old["machine"]["device"]  # an entry that older records lack is no change
    path.write_text(json.dumps(old))
    assert compared([row("a", 3.0, "x")], path)["changed"] == {"torch": "1.0.0", "cores": 999}
    assert json.loads(path.read_text()) == old  # comparing writes nothing


def test_the_machine_names_its_device():
    with using(torch.device("cpu")):
        assert machine()["device"].startswith("cpu: ")
    assert math.isfinite(machine()["cores"])


def test_table_shows_spread_verdict_and_the_last_value_beside_each_other():
    rows = [
        row("fast", Median(0.781, 0.742, 0.805), "x", 1.1, at_most=True, note="a busy machine"),
        row("slow", 1234.5, "turns/s", 2000.0),
    ]
    lines = table(rows, {"fast": 1.562}).splitlines()
    assert re.split("  +", lines[1]) == ["fast", "0.781 [0.742, 0.805]", "x", "1.1", "ok", "1.56", "0.50x"]
    assert re.split("  +", lines[2]) == ["slow", "1,234", "turns/s", "2,000", "MISSED"]
    assert lines[3] == "* fast: a busy machine"


@pytest.mark.parametrize("last", [0.0, -2.0])
def test_no_ratio_to_a_last_value_of_zero_or_another_sign(last):
    line = table([row("a", 2.0, "MB")], {"a": last}).splitlines()[1]
    assert not line.endswith("x")
    assert table([row("a", -1.0, "MB")], {"a": -2.0}).endswith("0.50x")
