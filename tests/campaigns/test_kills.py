"""Kills in short; ``python -m tests.campaigns kills --count 0`` kills at every write."""

from __future__ import annotations

from tests.campaigns.test_campaigns import run


def test_killed_commands_go_on():
    ended = run("kills", 3)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
