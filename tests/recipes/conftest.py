"""A prepared folder of visual dialogue that is made in seconds."""

from __future__ import annotations

import pytest

from torchrl_lang.recipes.prepare_visual_dialogue import PrepareVisualDialogue, main

TINY = {"train": 24, "val": 10, "test": 13, "feature_size": 64, "guesser_epochs": 3, "answerer_epochs": 1, "width": 16}


@pytest.fixture(scope="session")
def prepared_dialogues(tmp_path_factory):
    """The folder of ``prepare visual_dialogue``; tests must not write into it."""
    return main(PrepareVisualDialogue(out=tmp_path_factory.mktemp("visual_dialogue") / "prepared", **TINY))
