"""Damaged files in short; ``python -m tests.campaigns mutations --count N --seed S`` damages any number."""

from __future__ import annotations

import subprocess
import sys

from tests.campaigns.commands import environment
from tests.campaigns.mutators import MUTATORS


def run(name, count, *only):
    """A program of its own: attacks are forked from it, and the process of the tests may have other threads."""
    command = [sys.executable, "-m", "tests.campaigns", name, "--count", str(count), "--seed", "0"]
    command += ["--only", *only] if only else []
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)


def test_damage_is_refused_or_harmless():
    """As many damaged copies as there are kinds of damage: each kind occurs once."""
    ended = run("mutations", len(MUTATORS))
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
