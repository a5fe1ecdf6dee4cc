"""Two-clock advantages: by hand and against the plain recursion (``test_ppo`` compares them with TorchRL's)."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang import functional
from torchrl_lang.functional import decision_mask, group_advantages, turn_end_mask, two_clock_advantages
from torchrl_lang.functional.advantages import standardized, turn_states
from torchrl_lang.functional.decisions import row_length

CLOCKS = {"gamma": 0.5, "lmbda": 0.5, "turn_gamma": 0.25, "turn_lmbda": 0.75}


def ragged(n=40, width=24, seed=0, dtype=torch.float64):
    """Rows of several utterances of any length, some without an action, some that end with the agent's token."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(2, width + 1, (n,), generator=g)
    real = torch.arange(width) < length[:, None]
    agent = (torch.rand(n, width, generator=g) < 0.6) & real
    agent[:, 0] = False
    agent[0] = False
    reward, value = (torch.randn(n, width, generator=g, dtype=dtype) for _ in range(2))
    ended = torch.rand(n, generator=g) < 0.5
    last = value.gather(-1, (row_length(real) - 1)[:, None]).squeeze(-1)
    return real, agent, reward, value, torch.where(ended, 0, last)


def estimate(real, agent, reward, value, last_value, **options):
    return two_clock_advantages(reward, value, last_value, decision_mask(agent), turn_end_mask(real, agent), **options)


def plain(real, agent, reward, value, last_value, *, gamma, lmbda, turn_gamma, turn_lmbda, bootstrap):
    """The recursion of one row, in plain Python."""
    places = [p for p in range(len(agent) - 1) if agent[p + 1]]
    turns = [0]
    for before, after in pairwise(places):
        turns.append(turns[-1] + (after != before + 1))
    advantage = torch.zeros(len(agent), dtype=value.dtype)
    to_go = last_value
    for j in reversed(range(len(places))):
        p = places[j]
        final = j == len(places) - 1
        ends = bool(real[p + 2 :].any()) if final else turns[j + 1] != turns[j]
        g, trust = (turn_gamma, turn_lmbda) if ends else (gamma, lmbda)
        if final:
            following = last_value
        elif ends and bootstrap == "mean":
            own = [value[q] for q, turn in zip(places, turns, strict=True) if turn == turns[j + 1]]
            following = sum(own) / len(own)
        else:
            following = value[places[j + 1]]
        to_go = reward[p] + g * ((1 - trust) * following + trust * to_go)
        advantage[p] = to_go - value[p]
    return advantage


unit = st.floats(0, 1, width=32)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), unit, unit, unit, unit, st.sampled_from(["first", "mean"]))
def test_it_is_the_recursion(seed, gamma, lmbda, turn_gamma, turn_lmbda, bootstrap):
    rows = ragged(3, 12, seed)
    clocks = {"gamma": gamma, "lmbda": lmbda, "turn_gamma": turn_gamma, "turn_lmbda": turn_lmbda}
    options = clocks | {"bootstrap": bootstrap}
    got = estimate(*rows, **options)
    expected = torch.stack([plain(*row, **options) for row in zip(*rows, strict=True)])
    torch.testing.assert_close(got.advantage, expected, rtol=1e-9, atol=1e-9)


def test_padding_order_and_what_stands_elsewhere_change_nothing():
    real, agent, reward, value, last_value = ragged()
    expected = estimate(real, agent, reward, value, last_value, bootstrap="mean", **CLOCKS)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    shuffled = estimate(*(x[order] for x in (real, agent, reward, value, last_value)), bootstrap="mean", **CLOCKS)
    torch.testing.assert_close(shuffled.advantage, expected.advantage[order])
    decision = decision_mask(agent)
    wide = [torch.nn.functional.pad(x, (0, 7)) for x in (real, agent)]
    noise = [
        torch.nn.functional.pad(torch.where(decision, x, torch.nan), (0, 7), value=torch.nan) for x in (reward, value)
    ]
    padded = estimate(*wide, *noise, last_value, bootstrap="mean", **CLOCKS)
    torch.testing.assert_close(padded.advantage[:, :24], expected.advantage)
    assert not padded.advantage[:, 24:].any()
    assert not expected.advantage[~decision].any()
    assert not expected.value_target[~decision].any()
    deep = estimate(*(x.reshape(5, 8, *x.shape[1:]) for x in (real, agent, reward, value, last_value)), **CLOCKS)
    assert deep.advantage.shape == (5, 8, 24)


def test_the_clocks_by_default():
    rows = ragged(3, 12)
    clocks = {"gamma": 1.0, "lmbda": 0.95, "turn_gamma": 0.99, "turn_lmbda": 0.95}
    assert torch.equal(estimate(*rows).advantage, estimate(*rows, **clocks).advantage)


def test_standardized_values():
    values, counted = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.arange(50) < 30
    got = standardized(values, counted)
    expected = (values[:30] - values[:30].mean()) / values[:30].std()
    torch.testing.assert_close(got[:30], expected)
    assert not got[30:].any()
    spoilt = torch.where(counted, values, torch.nan)
    torch.testing.assert_close(standardized(spoilt, counted), got)
    for none in (torch.tensor([3.0]), torch.full((4,), 2.0), torch.zeros(0)):
        assert not standardized(none).any()
    assert not standardized(values, torch.zeros(50, dtype=torch.bool)).any()


@pytest.mark.parametrize("value", [-12.3, 0.1, 100.1, 1e5 / 3])
def test_equal_values_whose_mean_is_rounded_become_zero(value):
    for n in (3, 8, 16, 1000):
        values = torch.full((n,), value)
        given = torch.cat([values, torch.randn(9)]), torch.arange(n + 9) < n
        for found in (standardized(values), standardized(*given), group_advantages(values, torch.arange(n) % 2)):
            assert found.abs().amax() < 1e-5


GROUPS = [
    # returns, groups, advantages, without scale
    ([1.0, 5.0, 3.0, 5.0], [7, 2, 7, 2], [-(0.5**0.5), 0.0, 0.5**0.5, 0.0], [-1.0, 0.0, 1.0, 0.0]),
    ([0.0, 1.0, 2.0, 9.0], [0, 0, 0, 1], [-1.0, 0.0, 1.0, 0.0], [-1.0, 0.0, 1.0, 0.0]),
    ([0.0, 0.0, 0.0, 4.0], [3, 3, 3, 3], [-0.5, -0.5, -0.5, 1.5], [-1.0, -1.0, -1.0, 3.0]),
    ([], [], [], []),
]


def others(returns, groups, i):
    return [float(r) for j, r in enumerate(returns) if j != i and groups[j] == groups[i]]


@pytest.mark.parametrize(("returns", "groups", "scaled", "centred"), GROUPS)
def test_group_advantages_by_hand(returns, groups, scaled, centred):
    returns, groups = torch.tensor(returns), torch.tensor(groups, dtype=torch.int64)
    torch.testing.assert_close(group_advantages(returns, groups), torch.tensor(scaled))
    torch.testing.assert_close(group_advantages(returns, groups, scale=False), torch.tensor(centred))
    torch.testing.assert_close(group_advantages(3 * returns + 8, groups), torch.tensor(scaled))
    loo = [
        own - sum(rest) / max(len(rest), 1) if (rest := others(returns, groups, i)) else 0.0
        for i, own in enumerate(returns.tolist())
    ]
    torch.testing.assert_close(group_advantages(returns, groups, scale=False, baseline="others"), torch.tensor(loo))
    with pytest.raises(ValueError, match="group must have shape"):
        group_advantages(returns, groups[:, None])


def turns_of(real, agent):
    """The positions of the agent's tokens of each turn of a row, in plain Python."""
    places = [p for p in range(len(agent)) if agent[p]]
    turns = []
    for before, p in zip([-1, *places], places, strict=False):
        turns.append([]) if before != p - 1 else None
        turns[-1].append(p)
    return turns


def test_turn_advantages_are_gae_of_turns():
    """Values within a turn do not matter; a turn is a step of the recursion, its reward the sum of its tokens'."""
    real, agent, reward, value, last_value = ragged()
    decision, ends = decision_mask(agent), turn_end_mask(real, agent)
    found = functional.turn_advantages(reward, value, last_value, decision, ends, gamma=0.9, lmbda=0.8)
    for row in range(len(real)):
        turns, to_go, following = turns_of(real[row], agent[row]), last_value[row], last_value[row]
        for k, turn in reversed([*enumerate(turns)]):
            first, last = turn[0] - 1, turn[-1] - 1
            g, trust = (0.9, 0.8) if k + 1 < len(turns) or bool(ends[row, last]) else (1.0, 1.0)
            to_go = reward[row, first : last + 1].sum() + g * ((1 - trust) * following + trust * to_go)
            following = value[row, first]
            expected = (to_go - following).expand(len(turn))
            torch.testing.assert_close(found.advantage[row, first : last + 1], expected)
            torch.testing.assert_close(found.value_target[row, first : last + 1], to_go.expand(len(turn)))
    assert not found.advantage[~decision].any()


@pytest.mark.parametrize("anchor", ["prefix", "observation"])
def test_turns_of_a_group_are_compared_where_they_begin_in_equal_texts(anchor):
    """Texts of two tokens, so that many are equal; the states are dictionary keys here."""
    real, agent, reward, *_ = ragged(n=99, width=9)
    tokens = torch.randint(2, real.shape, generator=torch.Generator().manual_seed(1))
    group = torch.arange(99) % 3
    decision, ends = decision_mask(agent), turn_end_mask(real, agent)
    to_go = functional.returns_to_go(reward, decision, 1.0)
    state = turn_states(tokens, agent, ends, anchor=anchor)
    found = functional.state_advantages(to_go, group, state, decision, ends, scale=False)
    same = {}
    for row in range(99):
        for turn in turns_of(real[row], agent[row]):
            text, start = tokens[row, : turn[0]].tolist(), 0
            if anchor == "observation":
                start = max([p + 1 for p in range(turn[0]) if agent[row, p]], default=1)
            same.setdefault((int(group[row]), *text[start:]), []).append((row, turn))
    assert sum(len(turns) > 1 for turns in same.values()) > 10
    expected = torch.zeros_like(to_go)
    for turns in same.values():
        returns = torch.stack([to_go[row, turn[0] - 1] for row, turn in turns])
        for (row, turn), advantage in zip(turns, returns - returns.mean(), strict=True):
            expected[row, turn[0] - 1 : turn[-1]] = advantage
    torch.testing.assert_close(found, expected)
