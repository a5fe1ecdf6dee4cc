"""What tests of runs and of comparisons share."""

import shutil
from pathlib import Path

import pytest

from tests.processes import spawned
from tests.recipes.commands import Trainings
from tests.recipes.walks import ALGORITHMS, generate, train
from torchrl_lang.__main__ import main


@pytest.fixture(scope="session")
def walks(tmp_path_factory):
    """A folder with a dataset of 120 walks and a run of each offline algorithm; tests may add other runs."""
    folder = tmp_path_factory.mktemp("walks")
    generate(folder)
    for name, options in ALGORITHMS.items():
        assert train(folder, name, name, *options) == 0
    return folder


@pytest.fixture(scope="module")
def spawn():
    """Workers of the recipes end with the process that is their parent."""
    with spawned():
        yield


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


@pytest.fixture(scope="session")
def wordle(tmp_path_factory):
    """A folder with a dataset ``data`` of four words and a run ``bc`` on it; tests must not write into it."""
    folder = tmp_path_factory.mktemp("wordle")
    (folder / "words.txt").write_text("crane\nslate\npurge\nmouse\n")
    words = ["--words", str(folder / "words.txt"), "--games", "64", "--batch", "32"]
    assert main(["generate", "wordle", "--out", str(folder / "data"), *words]) == 0
    small = ["--layers", "2", "--width", "16", "--heads", "2", "--batch-size", "8", "--eval-games", "8"]
    bc = ["train", "bc", "--data", str(folder / "data"), "--out", str(folder / "bc"), *small]
    assert main([*bc, "--steps", "4", "--eval-every", "4"]) == 0
    return folder
