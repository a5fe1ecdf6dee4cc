"""Tasks are split without overlap."""

import pytest
import torch

from torchrl_lang.distillation import split_tasks


def test_parts_are_disjoint_and_complete():
    numbers = torch.arange(100, 181)
    split = split_tasks(numbers, seed=4)
    assert [len(part) for part in split] == [61, 8, 12]
    assert torch.cat(split).sort().values.tolist() == numbers.tolist()
    assert all(part.tolist() == sorted(part.tolist()) for part in split)
    assert split_tasks(numbers, seed=4).test.tolist() == split.test.tolist()
    assert split_tasks(numbers, seed=5).test.tolist() != split.test.tolist()


def test_parts_may_be_empty():
    assert [len(part) for part in split_tasks(5, validation=0, test=0)] == [5, 0, 0]


@pytest.mark.parametrize("shares", [{"validation": 0.5, "test": 0.5}, {"test": -0.1}])
def test_bad_shares(shares):
    with pytest.raises(ValueError, match="leave none of 10 tasks to train on"):
        split_tasks(10, **shares)
