"""What all tests need of the process that they run in."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tyro  # noqa: F401  it fails where a doctest before has left a tuple with a list as `builtins._`

from . import garbage
from .processes import use_a_server

# A shell that starts a job in the background makes it ignore Ctrl-C, and the commands that tests start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

use_a_server()
os.fsync = lambda descriptor: None  # it is for a machine that loses its power: a killed process loses nothing it wrote

SMALL = {"train": 48, "val": 10, "test": 13, "feature_size": 64, "width": 48}
SMALL |= {"guesser_epochs": 6, "answerer_epochs": 24}
"""Enough for answers that are sentences; the rewards of so bad a guesser are near to random."""


@pytest.fixture(scope="session")
def prepared_dialogues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of ``prepare visual_dialogue``, made once; tests must not write into it."""
    from torchrl_lang.envs.visual_dialogue.prepare import main
    from torchrl_lang.recipes.tasks.visual_dialogue import PrepareVisualDialogue

    options: Any = SMALL
    return main(PrepareVisualDialogue(out=tmp_path_factory.mktemp("visual_dialogue") / "prepared", **options))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """All tests are imported."""
    garbage.collect_what_comes_later()
