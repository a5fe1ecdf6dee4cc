"""Kills, damaged lines and odd texts in short; ``python -m tests.campaigns kills --count 0`` kills at every write."""

from __future__ import annotations

import pytest

from tests.campaigns.jsonl import MUTATIONS
from tests.campaigns.test_mutations import run
from tests.campaigns.texts import Failed, refused


def test_killed_commands_go_on():
    ended = run("kills", 1, "single")
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


def test_damaged_lines_are_refused_or_read_as_they_stand():
    ended = run("jsonl", 8 * len(MUTATIONS))
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


def test_texts_come_back_or_are_refused_by_place_and_character():
    ended = run("texts", 35)
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("a.csv line 2: 'é' is not in the alphabet.", None),
        ("a.csv: 'é' is not in the alphabet.", "unclear refusal"),
        ("a.csv line 2 is wrong.", "unclear refusal"),
        (None, "silent acceptance"),
    ],
)
def test_a_refusal_names_place_and_character(message, verdict):
    def read():
        if message is not None:
            raise ValueError(message)

    if verdict is None:
        refused(read, "a.csv line 2", of="aé")
    else:
        with pytest.raises(Failed, match=verdict):
            refused(read, "a.csv line 2", of="é")
