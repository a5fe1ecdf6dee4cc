"""A prepared folder of visual dialogue that is made in seconds, and what tests of comparisons share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipes.demos import Trainings
from tests.recipes.walks import ALGORITHMS, generate, train
from torchrl_lang.envs.visual_dialogue.prepare import main
from torchrl_lang.recipes.tasks.visual_dialogue import PrepareVisualDialogue

SMALL = {
    "train": 48,
    "val": 10,
    "test": 13,
    "feature_size": 64,
    "guesser_epochs": 20,
    "answerer_epochs": 40,
    "width": 48,
}
"""Enough for answers that are sentences; the rewards of so bad a guesser are near to random."""


@pytest.fixture(scope="session")
def prepared_dialogues(tmp_path_factory):
    """The folder of ``prepare visual_dialogue``; tests must not write into it."""
    return main(PrepareVisualDialogue(out=tmp_path_factory.mktemp("visual_dialogue") / "prepared", **SMALL))


@pytest.fixture(scope="session")
def walks(tmp_path_factory):
    """A folder with a dataset of 120 walks and a run of each offline algorithm; tests may add other runs."""
    folder = tmp_path_factory.mktemp("walks")
    generate(folder)
    for name, options in ALGORITHMS.items():
        assert train(folder, name, name, *options) == 0
    return folder


@pytest.fixture
def trainings(monkeypatch):
    """What was trained; it was trained in this process."""
    found = Trainings()
    found.take_over(monkeypatch)
    return found


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the test file's ``finished`` comparison to write into."""
    return Path(shutil.copytree(finished, tmp_path / "out"))
