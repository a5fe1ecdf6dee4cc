"""Every benchmark runs to its end on small sizes, and records nothing."""

import pytest

from benchmarks import __main__ as command
from benchmarks.common import RESULTS
from tests.processes import run

PROGRAM = """
import sys
from benchmarks.__main__ import main
from tests.engines import forked

with forked():  # processes of the TextWorld engine, which take seconds to start
    sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", command.NAMES)
def test_a_smoke_run(name, pytestconfig, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytestconfig.cache.mkdir("games")))  # TextWorld's are built once
    before = {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}
    program = run("-c", PROGRAM, "--smoke", "--device", "cpu", name)
    assert program.returncode == 0, program.stdout + program.stderr
    assert "MISSED" not in program.stdout
    _, *figures = program.stdout.split(f"\n{name} (", 1)[1].split("\n\n")[0].splitlines()
    assert figures, program.stdout
    assert {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")} == before
