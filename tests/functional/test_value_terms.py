"""The terms of the value losses: by hand, by their definitions, and their corner cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang.functional import advantage_weight, cql_term, expectile_loss
from torchrl_lang.functional.value_terms import explained_variance, margin_term, masked_mean

numbers = st.floats(-10, 10, width=32)


def test_expectile_table():
    for error, tau, loss in ((2.0, 0.75, 3.0), (-2.0, 0.75, 1.0), (0.0, 0.9, 0.0), (-1.0, 0.9, 0.1), (3.0, 0.5, 4.5)):
        assert expectile_loss(torch.tensor(error), tau).item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("term", [cql_term, margin_term])
def test_values_without_an_axis_of_heads_are_refused(term):
    with pytest.raises(ValueError, match=r"must be \[N, n_q, V\], got \[3, 5\].*unsqueeze\(1\)"):
        term(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=1, max_size=4),
    st.floats(0.2, 5),
    st.floats(-1, 1, width=32),
)
def test_cql_and_margin_by_their_definitions(heads, table, temperature, margin):
    q = torch.tensor(table, dtype=torch.float64).unsqueeze(1) * torch.arange(1, heads + 1)[None, :, None]
    action = torch.arange(len(table)) % 6
    cql, hinge = cql_term(q, action, temperature), margin_term(q, action, margin)
    for n in range(len(table)):
        for head in range(heads):
            values, taken = q[n, head].tolist(), q[n, head, action[n]].item()
            top = max(values) / temperature
            lse = top + math.log(sum(math.exp(v / temperature - top) for v in values))
            assert cql[n, head].item() == pytest.approx(lse - taken / temperature, abs=1e-9)
            squares = sum(max(0.0, v - taken + margin) ** 2 for v in values)
            assert hinge[n, head].item() == pytest.approx(squares, abs=1e-9)


def test_advantage_weight_table():
    advantage = torch.tensor([-1.0, 0.0, 2.0])
    table = [
        ({"temperature": 0.0}, [1, 1, 1]),
        ({"temperature": 1.0}, [math.exp(-1), 1, math.exp(2)]),
        ({"temperature": 1.0, "clip": 1.5}, [math.exp(-1), 1, 1.5]),
        ({"temperature": 1.0, "weighting": "sign"}, [0, 0, 1]),
        ({"temperature": 0.5, "weighting": "sign"}, [0.5, 0.5, 0.5]),
        ({"temperature": 0.8, "weighting": "sign", "clip": 0.5}, [0.2, 0.2, 0.5]),
    ]
    for options, expected in table:
        torch.testing.assert_close(advantage_weight(advantage, **options), torch.tensor(expected, dtype=torch.float32))
    assert advantage_weight(torch.tensor([1000.0]), 1.0, clip=20.0).item() == 20
    with pytest.raises(ValueError, match=r"weighting must be one of \['exp', 'sign'\], got 'soft'"):
        advantage_weight(advantage, 1.0, "soft")


def test_masked_mean_never_sees_what_is_masked():
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf")], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    mean = masked_mean(values, mask)
    assert mean.item() == 2
    mean.backward()
    assert values.grad.tolist() == [0.5, 0, 0.5, 0]
    assert masked_mean(values.detach(), mask & False).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_weight_has_a_finite_square(dtype):
    """And no smaller bound stands in the way."""
    weight = advantage_weight(torch.tensor([6e4, 1e3], dtype=dtype), 1.0)
    assert weight.square().isfinite().all()
    assert (weight > torch.finfo(dtype).max ** 0.48).all()


def test_constant_targets_explain_nothing():
    for n, value in ((3, 0.1), (37, 0.7), (377, 0.95), (377, 1e4)):
        target, mask = torch.full((n,), value), torch.ones(n, dtype=torch.bool)
        assert explained_variance(torch.linspace(0, 1, n), target, mask) == 0
