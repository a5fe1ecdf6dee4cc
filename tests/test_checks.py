"""Checks of numbers of something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_lang._checks import at_least_one, count


@pytest.mark.parametrize("value", [1, 2**70, np.int64(3), torch.tensor(2)])
def test_integers(value):
    at_least_one("n", value)
    count("n", value)


@pytest.mark.parametrize("value", [1.0, 1.5, np.float64(2.0), True, "2", None, [1], float("inf"), torch.tensor(2.0)])
def test_what_is_no_integer(value):
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got"):
        at_least_one("n", value)


def test_too_few():
    count("n", 0)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        at_least_one("n", 0)
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        count("n", -1)


def test_in_compiled_functions():
    def cut(x, n):
        at_least_one("n", n)
        return x[:n] * 2

    compiled = torch.compile(cut, backend="eager", fullgraph=True)
    for n in (1, 2, 3, 4):  # from the second on, n is a symbol
        assert compiled(torch.ones(5), n).shape == (n,)
