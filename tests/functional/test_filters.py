"""Top-k, top-p, min-p and temperature, by hand and against a loop over the sorted tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang.functional import filter_logits
from torchrl_lang.functional.filters import min_p_filter, top_k_filter, top_p_filter

PROBS, ORDER = torch.tensor([0.3, 0.5, 0.05, 0.15]).log(), [1, 0, 3, 2]
TABLES = [  # a number and how many of the likeliest tokens it keeps
    (top_p_filter, [(0.4, 1), (0.6, 2), (0.81, 3), (0.94, 3), (0.96, 4), (1.0, 4)]),  # the one that passes p is kept
    (top_k_filter, [(1, 1), (2, 2), (3, 3), (4, 4), (9, 4)]),
    (min_p_filter, [(0.05, 4), (0.2, 3), (0.35, 2), (0.61, 1), (1.0, 1)]),
]


@pytest.mark.parametrize(("keep", "table"), TABLES)
def test_tables(keep, table):
    for option, kept in table:
        assert keep(PROBS, option).isfinite().nonzero().flatten().tolist() == sorted(ORDER[:kept]), option


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(-30, 30), min_size=2, max_size=12), st.floats(0.02, 0.98))
def test_top_p_is_the_smallest_set_that_passes_p_with_ties(logits, p):
    logits = torch.tensor(logits, dtype=torch.float64) / 8
    probs = logits.softmax(-1)
    total, threshold = 0.0, -math.inf
    for value in sorted(logits.tolist(), reverse=True):
        total += float(probs[logits == value][0])
        threshold = value
        if total > p + 1e-9:
            break
        if total > p - 1e-9:
            return  # a tie with p itself: rounding decides
    assert torch.equal(top_p_filter(logits, p).isfinite(), logits >= threshold)


def test_rounding_below_p_keeps_all():
    assert top_p_filter(torch.zeros(7), 1 - 1e-9).isfinite().all()


def test_filters_compose_and_leave_their_input():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    before = logits.clone()
    got = filter_logits(logits, temperature=0.5, top_k=3, top_p=0.5)
    assert got.tolist() == [[4.0, -math.inf, -math.inf, -math.inf]]
    assert torch.equal(logits, before)
    # The temperature changes how much less likely a token is than the first: e**-1 becomes e**-2.
    assert filter_logits(logits, min_p=0.2).isfinite().tolist() == [[True, True, False, False]]
    assert filter_logits(logits, temperature=0.5, min_p=0.2).isfinite().tolist() == [[True, False, False, False]]
    assert filter_logits(logits) is logits
    for option, value in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.5), ("min_p", 0.0)):
        with pytest.raises(ValueError, match=f"{option} must .*, got {value}"):
            filter_logits(logits, **{option: value})
