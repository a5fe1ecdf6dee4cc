"""One table of all benchmarks, and the command that makes it."""

import json
import sys
import types

import pytest

from benchmarks import __main__ as command
from benchmarks import overview
from benchmarks.common import RESULTS, Median, row

NAMES = ("toy", "other")


def toy(rows, doc="A toy."):
    module = types.ModuleType("toy", doc)
    module.run = lambda quick: rows() if callable(rows) else rows
    return module


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Two small benchmarks that are measured like any other, and a folder of their own."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(command, "NAMES", NAMES)
    monkeypatch.setitem(sys.modules, "benchmarks.toy", toy([row("a", Median(0.5, 0.4, 0.7), "x", 1.0, at_most=True)]))
    monkeypatch.setitem(sys.modules, "benchmarks.other", toy([row("b|c", 3.0, "ms", note="noted")]))
    return tmp_path


def test_a_run_prints_the_table_and_writes_records_and_page(folder, capsys, monkeypatch):
    assert command.main(["--device", "cpu"]) == 0
    assert "0.5 [0.4, 0.7]" in capsys.readouterr().out
    assert json.loads((folder / "toy.json").read_text())["rows"][0]["high"] == 0.7
    before = {path.name: path.read_text() for path in folder.iterdir()}
    for line in ("| a | 0.5 [0.4, 0.7] | x | 1 | ok |  |  |", "b\\|c", "* b|c: noted"):
        assert line in before["table.md"]
    # A quick look compares and records nothing.
    command.main(["--device", "cpu", "--quick"])
    assert "1.00x" in capsys.readouterr().out
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    # A second run of one benchmark compares and keeps the others on the page.
    monkeypatch.setitem(sys.modules, "benchmarks.toy", toy([row("a", 2.0, "x", 1.0, at_most=True)]))
    assert command.main(["--device", "cpu", "toy"]) == 1  # it missed its target
    assert "b|c" not in capsys.readouterr().out
    for line in ("| a | 2 | x | 1 | MISSED | 0.5 | 4.00x |", "b\\|c"):
        assert line in (folder / "table.md").read_text()


def test_every_record_of_the_repository_can_be_shown():
    """Those of earlier versions, too, which knew no spread."""
    records = overview.recorded(RESULTS, command.NAMES)
    assert records
    shown = overview.text(records)
    assert all(entry["name"] in shown for found in records.values() for entry in found["rows"])
    assert overview.markdown(records).count("| what |") == 1
