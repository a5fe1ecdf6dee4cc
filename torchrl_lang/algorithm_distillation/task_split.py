"""Split tasks into those to train on, to choose checkpoints on, and to report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_lang._files import shorten

__all__ = ["TaskSplit", "split_tasks"]


class TaskSplit(NamedTuple):
    """Numbers of tasks, int64, sorted; no task is in two of them.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import split_tasks
        >>> train, validation, test = split_tasks(8, validation=0.25, test=0.25)
        >>> len(train), validation.shape, test.dtype
        (4, torch.Size([2]), torch.int64)
    """

    train: Tensor
    validation: Tensor
    test: Tensor


def split_tasks(
    tasks: int | Sequence[int] | Tensor, *, validation: float = 0.1, test: float = 0.15, seed: int = 0
) -> TaskSplit:
    """Split tasks at random.

    Args:
        tasks: the numbers of the tasks, each once, or how many there are.
        validation: share of the tasks on which checkpoints are chosen.
        test: share of the tasks that are reported.
        seed: seed of the split.

    Raises:
        ValueError: a number is repeated, a share is negative, or no task is left to train on.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import split_tasks
        >>> split = split_tasks(81, seed=0)
        >>> [len(part) for part in split]
        [61, 8, 12]
    """
    numbers = torch.arange(tasks) if isinstance(tasks, int) else torch.as_tensor(tasks, dtype=torch.int64).flatten()
    different, counts = numbers.unique(return_counts=True)
    if len(different) < len(numbers):
        raise ValueError(
            f"tasks must differ, but {shorten(different[counts > 1].tolist())} are repeated: give each number once."
        )
    held_out = [round(share * len(numbers)) for share in (validation, test)]
    if min(validation, test) < 0 or sum(held_out) >= len(numbers):
        raise ValueError(
            f"validation={validation} and test={test} leave none of {len(numbers)} tasks to train on: give smaller "
            f"shares, of at least 0."
        )
    order = numbers[torch.from_numpy(np.random.default_rng(seed).permutation(len(numbers)))]
    parts = order.split([len(numbers) - sum(held_out), *held_out])
    return TaskSplit(*(part.sort().values for part in parts))
