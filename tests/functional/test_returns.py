"""Returns against the plain recursions, by hand, and where powers of gamma underflow."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang.functional import lambda_returns, returns_to_go

rewards = st.floats(-5, 5, width=32)
step = st.tuples(rewards, st.floats(-5, 5, width=32), st.booleans())  # reward, value, is a decision
rows = st.integers(1, 20).flatmap(lambda n: st.lists(st.lists(step, min_size=n, max_size=n), min_size=1, max_size=3))
unit = st.floats(0, 1, width=32)


def columns(table):
    table = torch.tensor(table, dtype=torch.float64)
    return table[..., 0], table[..., 1], table[..., 2].bool()


@settings(max_examples=50, deadline=None)
@given(rows, unit)
def test_rewards_to_go_are_the_sums(table, gamma):
    reward, _, decision = columns(table)
    got = returns_to_go(reward, decision, gamma)
    for r, d, g in zip(reward, decision, got, strict=True):
        own = r[d].tolist()
        expected = [sum(gamma ** (i - j) * own[i] for i in range(j, len(own))) for j in range(len(own))]
        torch.testing.assert_close(g[d], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_underflow_of_gamma_to_the_t_is_no_nan():
    decision = torch.ones(1200, dtype=torch.bool)
    got = returns_to_go(torch.ones(1200), decision, 0.9)
    expected = (1 - 0.9 ** (1200 - torch.arange(1200.0, dtype=torch.float64))) / 0.1
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
    late = torch.zeros(1200).index_fill(0, torch.tensor([1199]), 1.0)
    assert returns_to_go(late, decision, 0.9)[0] == 0  # 0.9**1199 in float32
    assert returns_to_go(late, decision, 0.9).isfinite().all()


@settings(max_examples=50, deadline=None)
@given(rows, unit, unit, st.floats(-5, 5, width=32))
def test_lambda_returns_are_the_recursion(table, gamma, lmbda, worth):
    reward, value, decision = columns(table)
    bootstrap = torch.full(reward.shape[:1], worth, dtype=torch.float64)
    got = lambda_returns(reward, value, bootstrap, decision, gamma, lmbda)
    after = bootstrap
    for t in reversed(range(reward.shape[1])):
        mixed = (1 - lmbda) * value[:, t] + lmbda * (reward[:, t] + gamma * after)
        after = torch.where(decision[:, t], mixed, after)
        torch.testing.assert_close(got[:, t], after, rtol=1e-8, atol=1e-8)
