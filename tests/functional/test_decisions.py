"""States, actions and successors of rows, against a scan of the row token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang.functional import decision_mask, find_decisions, shift_left
from torchrl_lang.functional.decisions import row_length

# Rows as strings: "e" the environment's token, "a" the agent's, "." padding.
TABLE = [  # row, decisions, bootstrap state
    ("eaaeea", [0, 1, 4], 5),
    ("eaaee.", [0, 1], 4),  # what the environment says last is the bootstrap state
    ("eaa...", [0, 1], 2),  # truncated behind an action
    ("eaaaa.", [0, 1, 2, 3], 4),  # two utterances without a reply are one run of decisions
    ("ee....", [], None),
    ("e.....", [], None),
    ("......", [], None),
    ("ea....", [0], 1),
    ("aeea..", [2], 3),  # nobody decided the first token
    ("aee...", [], None),
]


def masks(rows):
    real = torch.tensor([[c != "." for c in row] for row in rows])
    agent = torch.tensor([[c == "a" for c in row] for row in rows])
    return real, agent


def scan(row):
    """(state, successor, is the last) of each decision, token by token."""
    decisions = [p for p in range(len(row) - 1) if row[p + 1] == "a"]
    states = [*decisions, len(row.rstrip(".")) - 1]
    return [(p, states[i + 1], i + 1 == len(decisions)) for i, p in enumerate(decisions)]


def test_table():
    rows, decisions, bootstraps = zip(*TABLE, strict=True)
    real, agent = masks(rows)
    assert [mask.nonzero().flatten().tolist() for mask in decision_mask(agent)] == list(decisions)
    found = find_decisions(real, agent)
    after = found.state[found.last] + 1
    assert found.row[after].tolist() == [row for row, p in enumerate(bootstraps) if p is not None]
    assert found.position[after].tolist() == [p for p in bootstraps if p is not None]
    assert row_length(real).tolist() == [len(row.rstrip(".")) for row in rows]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ea", max_size=9), min_size=1, max_size=5))
def test_any_ragged_batch(rows):
    rows = [row.ljust(9, ".") for row in rows]
    real, agent = masks(rows)
    found = find_decisions(real, agent)
    at = [
        (row, position, successor, last) for row, (text) in enumerate(rows) for position, successor, last in scan(text)
    ]
    here, there = found.state, found.state + 1
    got = zip(
        found.row[here].tolist(),
        found.position[here].tolist(),
        found.position[there].tolist(),
        found.last.tolist(),
        strict=True,
    )
    assert list(got) == at
    assert torch.equal(found.row[here], found.row[there])
    assert len(found.row) == len(at) + len({row for row, *_ in at})  # one bootstrap state a row that decides


def test_shift_left_keeps_shape_and_dtype():
    values = torch.arange(12.0).reshape(2, 2, 3)
    assert shift_left(values).tolist() == [[[1, 2, 0], [4, 5, 0]], [[7, 8, 0], [10, 11, 0]]]
    assert shift_left(torch.ones(1, 1, dtype=torch.bool)).tolist() == [[False]]
