"""Tasks are split without overlap."""

import pytest
import torch

from torchrl_lang.algorithm_distillation import split_tasks


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


def test_a_column_of_numbers_is_a_list_of_them():
    numbers = torch.arange(100, 181)
    column = split_tasks(numbers[:, None], seed=4)
    assert all(map(torch.equal, column, split_tasks(numbers, seed=4)))


@pytest.mark.parametrize(("tasks", "repeated"), [([1] * 10, r"\[1\]"), ([3, 7, 3, 5, 7], r"\[3, 7\]")])
def test_repeated_tasks_are_refused(tasks, repeated):
    with pytest.raises(ValueError, match=rf"tasks must differ, but {repeated} are repeated: give each number once"):
        split_tasks(tasks)
