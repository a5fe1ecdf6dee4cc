"""The campaigns in short; ``python -m tests.campaigns NAME --count N --seed S`` runs them at any length."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.campaigns.commands import environment


def run(name, count):
    """A program of its own: attacks are forked from it, and the process of the tests may have other threads."""
    command = [sys.executable, "-m", "tests.campaigns", name, "--count", str(count), "--seed", "0"]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("name", "count"), [("mutations", 60), ("jsonl", 136)])
def test_damage_is_refused_or_harmless(name, count):
    ended = run(name, count)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
