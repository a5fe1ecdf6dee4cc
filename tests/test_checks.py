"""Checks of numbers of something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_lang._checks import check_options


@pytest.mark.parametrize("value", [0.1, 1, np.float32(0.5), torch.tensor(0.25), None])
def test_options_in_their_range(value):
    check_options(share=(value, "(0, 1]"), bound=(value, "(-inf, inf)"), rows=(3, 1), kind=("td", ("td", None)))
    check_options(rows=(None, 1), kind=(None, ("td", None)))


@pytest.mark.parametrize(
    "option",
    [(0, "(0, 1]"), (1.1, "(0, 1]"), (1, "[0, 1)"), (-0.1, "[0, 1]"), ("x", "[0, 1]"), (float("nan"), "[0, inf)")]
    + [(float("inf"), "(-inf, inf)"), (0, 1), (1.5, 1), (True, 1), ("monte", ("td", "mc")), (None, ("td", "mc"))],
)
def test_options_outside_of_their_range(option):
    with pytest.raises(ValueError, match=r"^share must .*, got "):
        check_options(rows=(1, 1), share=option)
