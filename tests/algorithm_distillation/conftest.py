"""Small histories with episodes of one length, and of many."""

import pytest
import torch

from tests.algorithm_distillation.models import continuous, model
from torchrl_lang.algorithm_distillation import LearningHistory
from torchrl_lang.algorithm_distillation.sources import LinearDecay, NoisyExpert, QLearning
from torchrl_lang.envs.grids import DarkRoomEnv

TASKS = [2, 5, 7]


def source(reward="once", seed=0, steps=60, algorithm=NoisyExpert):
    """Three tasks, two streams; with a reward once most episodes are terminated, and some truncated."""
    options = {"task": torch.tensor(TASKS)[:, None], "batch_size": [3, 2], "episode_length": 7, "start": "random"}
    return algorithm(DarkRoomEnv(3, reward=reward, **options), steps, decay=LinearDecay(1, 0.5), seed=seed)


@pytest.fixture(scope="module")
def history():
    made = source()
    return LearningHistory(made.history(), made.tasks)


@pytest.fixture
def q_source():
    return source(algorithm=QLearning)


@pytest.fixture(params=[model, continuous])
def made(request):
    """A model of discrete or of continuous entries."""
    return request.param()
