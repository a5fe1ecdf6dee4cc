"""The command line as a process: what happens to its output, its input and its signals."""

import io
import os
import subprocess
import sys

import pytest

from torchrl_lang.__main__ import main
from torchrl_lang.envs.wordle import play_human
from torchrl_lang.evaluation import Summary, format_table
from torchrl_lang.recipes.command_line import describe

PRINTING = """
import dataclasses, runpy, sys, types
from torchrl_lang.recipes.options import Options
demo = sys.modules["torchrl_lang.recipes.demo"] = types.ModuleType("demo")
demo.Demo = dataclasses.make_dataclass("Demo", [], bases=(Options,))
demo.main = lambda options: print("71.0 \\u00b1 1.4 % \\U0001f7e9")
sys.argv = ["torchrl_lang", "demo"]
runpy.run_module("torchrl_lang", run_name="__main__", alter_sys=True)
"""
"""The command line, with a command that only prints and needs no torch."""


def printing(stdout, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    options = {"stdout": stdout, "stderr": subprocess.PIPE, "timeout": 120}
    return subprocess.run([sys.executable, "-c", PRINTING], env=environment, **options)


@pytest.mark.skipif(os.name != "posix", reason="needs pipes as Unix has them")
def test_nobody_reads():
    """As with `| head`: the reader of the pipe is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    process = printing(writer)
    os.close(writer)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_the_disk_of_the_output_is_full():
    with open("/dev/full", "w") as full:
        process = printing(full)
    assert process.returncode == 2
    assert process.stderr.startswith(b"torchrl_lang: runs/demo: No space left on device; make room on that disk")
    assert process.stderr.count(b"\n") == 1


def test_a_table_is_printed_where_only_ascii_can_be():
    assert "±" in format_table([Summary("BC", 10, -4.0, 0.1, 0.7, 0.01, 4.0)])
    process = printing(subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (process.returncode, process.stdout) == (0, b"71.0 +- 1.4 % ?\n"), process.stderr


def test_nobody_guesses(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of a closed input
    assert main(["play", "wordle"]) == 2
    assert capsys.readouterr().err.startswith("torchrl_lang: Standard input is closed: open it to play")
    monkeypatch.setattr(sys, "stdin", io.StringIO("crane\n"))  # which then ends
    assert main(["play", "wordle", "--seed", "0"]) == 0
    out = capsys.readouterr().out
    assert "The word was" in out


def test_ctrl_c_while_somebody_guesses(monkeypatch, capsys):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchrl_lang.envs.wordle.play_human", lambda env: play_human(env, input_fn=interrupted))
    assert main(["play", "wordle"]) == 130
    assert capsys.readouterr().err == "torchrl_lang: stopped\n"


def test_bugs_keep_their_traceback():
    def described(code):
        try:
            exec(compile(code, "elsewhere.py", "exec"))
        except Exception as error:
            return describe(error)

    assert described("int('x')") is described("{}['x']") is described("None.x") is None  # raised by others
    assert described("from torchrl_lang.envs.wordle.words import load_words; load_words([])").startswith("the word")
    assert describe(RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 bytes")).startswith("out of memory (")
    assert described("import numpy; numpy.empty(1 << 50)").startswith("out of memory (Unable to allocate")
