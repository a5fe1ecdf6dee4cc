"""Checks of numbers of something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_lang._checks import at_least_one, check_options, count


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


@pytest.mark.parametrize("value", [0.1, 1, np.float32(0.5), torch.tensor(0.25), None])
def test_options_in_their_range(value):
    check_options(share=(value, "(0, 1]"), bound=(value, "(-inf, inf)"), rows=(3, 1), kind=("td", ("td", "mc")))


@pytest.mark.parametrize(
    "option",
    [(0, "(0, 1]"), (1.1, "(0, 1]"), (1, "[0, 1)"), (-0.1, "[0, 1]"), ("x", "[0, 1]"), (float("nan"), "[0, inf)")]
    + [(float("inf"), "(-inf, inf)"), (0, 1), (1.5, 1), (True, 1), ("monte", ("td", "mc")), ([], ("td", "mc"))],
)
def test_options_outside_of_their_range(option):
    with pytest.raises(ValueError, match=r"^share must .*, got "):
        check_options(rows=(1, 1), share=option)
