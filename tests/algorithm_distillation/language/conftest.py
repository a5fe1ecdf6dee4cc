import pytest
import torch

from tests.algorithm_distillation.language.examples import LETTERS
from torchrl_lang.text import Episode, Turn, to_rows


@pytest.fixture(params=["compact", "spelled", "sparse"])
def kind(request):
    return request.param


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def rows():
    """Two episodes, of two turns of the agent and of one."""
    first = [Turn("ab"), Turn("c", reward=1.0), Turn("f"), Turn("ba", reward=-0.5), Turn("d")]
    return to_rows([Episode(first, terminated=True), Episode([Turn("e", reward=0.25)], terminated=True)], LETTERS, 16)
