"""Writers of learning histories: what they refuse, and what a failure leaves."""

import pytest
import torch

from tests.distillation.conftest import source
from torchrl_lang.distillation import HistoryWriter, LearningHistory


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        (("a", "b"), (1,), "'a' of a step is a TensorDict, expected a tensor: give its entries names of their own"),
        ("empty", (2, 0), r"'empty' of a step has shape \[2, 0\], expected sizes of at least 1: leave it out"),
    ],
)
def test_entries_that_cannot_be_stored(tmp_path, key, shape, message):
    made = source()
    steps = made.history().set(key, torch.ones(3, 2, 60, *shape))
    with pytest.raises(ValueError, match=message):
        LearningHistory(steps, made.tasks)
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer, pytest.raises(ValueError, match=message):
        writer.extend(steps)
    assert not list(tmp_path.iterdir())
