"""A server of models that need no training."""

import pytest

from tests.envs.visual_dialogue.word_overlap import WordOverlap, ask
from torchrl_lang.envs.visual_dialogue import DialogueServer


@pytest.fixture(scope="module")
def models():
    return WordOverlap()


@pytest.fixture(scope="module")
def server(models):
    pytest.importorskip("uvicorn")
    with DialogueServer(models, ask, name="word overlap") as running:
        yield running
