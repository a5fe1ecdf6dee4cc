from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang.modules.length_groups import length_groups


def cost(groups, call):
    return sum(rows.shape[0] * width + call for rows, width in groups)


def best_cost(length, call):
    """By trying every way to cut the sorted rows."""
    ordered = sorted(max(n, 1) for n in length)
    found = []
    for count in range(len(ordered)):
        for cuts in combinations(range(1, len(ordered)), count):
            ends = [0, *cuts, len(ordered)]
            found.append(sum((b - a) * ordered[b - 1] + call for a, b in pairwise(ends)))
    return min(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 60))
def test_no_split_costs_less(length, call):
    groups = length_groups(torch.tensor(length), call=call)
    assert cost(groups, call) == best_cost(length, call)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=200), st.integers(0, 500))
def test_each_row_stands_in_one_group_that_is_wide_enough(length, call):
    length = torch.tensor(length)
    groups = length_groups(length, call=call)
    assert torch.cat([rows for rows, _ in groups]).sort().values.tolist() == list(range(length.shape[0]))
    for rows, width in groups:
        assert width == max(int(length[rows].max()), 1)


def test_many_different_lengths_are_rounded_but_nearly_nothing_is_lost():
    length = torch.arange(1, 1001)
    groups = length_groups(length, call=0)
    assert len(groups) == 48
    assert cost(groups, 0) <= 1.03 * int(length.sum())


@pytest.mark.parametrize(("call", "widths"), [(0, [26, 38, 74]), (500, [38, 74]), (5000, [74])])
def test_groups_as_worked_out_by_hand(call, widths):
    # 40 rows of 26, 40 of 38, 10 of 74: running the first with the second costs 480 tokens, those with the last 2,880.
    length = torch.tensor([26] * 40 + [38] * 40 + [74] * 10)
    assert [width for _, width in length_groups(length, call=call)] == widths


def test_no_rows_make_no_group():
    assert length_groups(torch.zeros(0, dtype=torch.int64)) == []
