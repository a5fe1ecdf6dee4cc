"""Checks of numbers of something."""

from __future__ import annotations

import inspect
from typing import Literal

import numpy as np
import pytest
import torch

from torchrl_lang._checks import Count, Unit, check_given, check_options, checked


@pytest.mark.parametrize("value", [0.1, 1, np.float32(0.5), torch.tensor(0.25)])
def test_options_in_their_range(value):
    check_options(share=(value, "(0, 1]"), bound=(value, "(-inf, inf)"), rows=(3, 1), kind=("td", ("td", None)))
    check_options(kind=(None, ("td", None)))
    check_given(share=(value, "(0, 1]"), other=(None, "(0, 1]"), rows=(None, 1))


@pytest.mark.parametrize(
    "option",
    [(0, "(0, 1]"), (1.1, "(0, 1]"), (1, "[0, 1)"), (-0.1, "[0, 1]"), ("x", "[0, 1]"), ("0.1", "[0, 1]")]
    + [(float("nan"), "[0, inf)"), (float("inf"), "(-inf, inf)"), (None, "[0, 1]"), (None, 1)]
    + [(0, 1), (1.5, 1), (torch.tensor(1.5), 1), (True, 1), ("monte", ("td", "mc")), (None, ("td", "mc"))],
)
def test_options_outside_of_their_range(option):
    with pytest.raises(ValueError, match=r"^share must .*, got "):
        check_options(rows=(1, 1), share=option)
    if option[0] is not None:
        with pytest.raises(ValueError, match=r"^share must .*, got "):
            check_given(rows=(1, 1), share=option)


def test_declared_options_are_checked_by_name_and_by_place():
    for wrong in ((0,), (1, "b"), (1, "a", 1.5)):
        with pytest.raises(ValueError, match=r"^(rows|kind|share) must .*, got "):
            _function(*wrong)
    with pytest.raises(ValueError, match=r"^rows must .*, got None"):
        _function(rows=None)
    for wrong in ((1, "a", 10**400), (1, np.array(["a", "a"]))):
        with pytest.raises(ValueError, match=r"^(kind|share) must .*, got "):
            _function(*wrong)
    assert _function(2, "a", None, other="anything") == 2
    assert str(inspect.signature(_function)).startswith("(rows: 'Count', kind")


@checked
def _function(
    rows: Count,
    kind: Literal["a"] = "a",
    share: Unit | None = None,
    other: Literal["c"] | int | unknown = 1,  # noqa: F821
) -> int:
    return rows
