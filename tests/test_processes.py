"""Programs that are forked from a server end and print as those do that are started."""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest

from tests.processes import IMPORTED, Forked, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", IMPORTED)
def test_what_the_server_imports_is_there(name):
    """The server leaves out in silence what it cannot find."""
    assert importlib.util.find_spec(name) is not None


def test_output_arguments_and_endings(tmp_path):
    (tmp_path / "script.py").write_text("import os, sys; print(sys.argv[1:], os.getcwd()); sys.exit(3)")
    ended = run(tmp_path / "script.py", 1, "b", cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, f"['1', 'b'] {tmp_path}\n", "")
    failed = run("-c", "raise KeyError('nothing')")
    assert failed.returncode == 1
    assert failed.stderr.endswith("KeyError: 'nothing'\n")


@pytest.mark.parametrize("start", [subprocess.Popen, Forked])
def test_forks_print_and_end_as_started_ones_do(start):
    options = {"env": {**os.environ, "KEY": "value"}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for code, printed, ending in (
        ("print(os.environ['KEY'], sys.argv[1:]); sys.exit(3)", "value ['x']\n", 3),
        ("sys.stderr.write('y')", "y", 0),
        ("os.kill(os.getpid(), 15)", "", -signal.SIGTERM),
    ):
        process = start([sys.executable, "-c", f"import os, sys; {code}", "x"], text=True, **options)
        with process.stdout:
            assert process.stdout.read() == printed
        assert process.wait(60) == ending
