"""Kills and damaged lines in short; ``python -m tests.campaigns kills --count 0`` kills at every write."""

from __future__ import annotations

from tests.campaigns.jsonl import MUTATIONS
from tests.campaigns.test_mutations import run


def test_killed_commands_go_on():
    ended = run("kills", 1, "single")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


def test_damaged_lines_are_refused_or_read_as_they_stand():
    ended = run("jsonl", 8 * len(MUTATIONS))
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
