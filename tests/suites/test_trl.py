"""TRL's GRPOTrainer plays this library's games."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-suites runs these tests")

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_wordle.py"


def test_a_step_of_training_plays_wordle(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    calls = re.search(r"reward (\S+), calls of the tool per game (\S+)", done.stdout)
    assert float(calls[2]) > 0
    assert float(calls[1]) < 0
    assert float(re.search(r"weights changed by (\S+)", done.stdout)[1]) > 0


def test_the_benchmark_beside_its_trainers():
    command = [sys.executable, "-m", "benchmarks", "--smoke", "chat_model"]
    done = subprocess.run(command, cwd=EXAMPLE.parents[1], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "PPO iteration / TRL's GRPO iteration" in done.stdout
