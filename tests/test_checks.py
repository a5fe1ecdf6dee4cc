"""Checks of numbers of something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_lang._checks import check_given, check_options


@pytest.mark.parametrize("value", [0.1, 1, np.float32(0.5), torch.tensor(0.25)])
def test_options_in_their_range(value):
    check_options(share=(value, "(0, 1]"), bound=(value, "(-inf, inf)"), rows=(3, 1), kind=("td", ("td", None)))
    check_options(kind=(None, ("td", None)))
    check_given(share=(value, "(0, 1]"), other=(None, "(0, 1]"), rows=(None, 1))


@pytest.mark.parametrize(
    "option",
    [(0, "(0, 1]"), (1.1, "(0, 1]"), (1, "[0, 1)"), (-0.1, "[0, 1]"), ("x", "[0, 1]"), (float("nan"), "[0, inf)")]
    + [
        (float("inf"), "(-inf, inf)"),
        (0, 1),
        (1.5, 1),
        (torch.tensor(1.5), 1),
        (True, 1),
        ("monte", ("td", "mc")),
        (None, ("td", "mc")),
    ]
    + [(None, "[0, 1]"), (None, 1)],
)
def test_options_outside_of_their_range(option):
    with pytest.raises(ValueError, match=r"^share must .*, got "):
        check_options(rows=(1, 1), share=option)
    if option[0] is not None:
        with pytest.raises(ValueError, match=r"^share must .*, got "):
            check_given(rows=(1, 1), share=option)
