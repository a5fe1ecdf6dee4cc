"""What tests of runs and of comparisons share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.recipes.demos import Trainings
from tests.recipes.walks import ALGORITHMS, generate, train


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
