"""A server of models that need no training."""

import pytest
import torch

from tests.envs.visual_dialogue.word_overlap import SIZE, WORDS, WordOverlap, ask, image
from torchrl_lang.envs.visual_dialogue import DialogueServer
from torchrl_lang.envs.visual_dialogue.dialogue import Dialogue, Round


@pytest.fixture(scope="module")
def models():
    return WordOverlap()


@pytest.fixture(scope="module")
def server(models):
    pytest.importorskip("uvicorn")
    with DialogueServer(models, ask, name="word overlap") as running:
        yield running


def make_batch(count, seed=0, size=SIZE):
    """Dialogues of 0 to 4 rounds, a question of each, and features ``[count, size]``."""
    generator = torch.Generator().manual_seed(seed)

    def word():
        return WORDS[int(torch.randint(len(WORDS), (), generator=generator))]

    dialogues = []
    for number in range(count):
        rounds = [Round(f"is it {word()}?", ("yes", "no")[(number + turn) % 2]) for turn in range(number % 5)]
        dialogues.append(Dialogue(f"a {word()} {word()}", tuple(rounds)))
    features = torch.stack([image(seed * 1000 + number) for number in range(count)])
    return dialogues, [f"is it {word()} or {word()}?" for _ in range(count)], features
