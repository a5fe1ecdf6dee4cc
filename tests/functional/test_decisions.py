"""States, actions and successors of rows, against a scan of the row token by token."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchrl_lang.functional import decision_mask
from torchrl_lang.functional.decisions import find_decisions, row_length, until_last_decision


def scan(row):
    """(state, successor, is the last) of each decision, token by token."""
    decisions = [p for p in range(len(row) - 1) if row[p + 1] == "a"]
    states = [*decisions, len(row.rstrip(".")) - 1]
    return [(p, states[i + 1], i + 1 == len(decisions)) for i, p in enumerate(decisions)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ea", max_size=9), min_size=1, max_size=5))
@example(["eaaeea", "eaaee", "eaa", "eaaaa", "ee", "", "aeea", "aee"])
def test_any_ragged_batch(rows):
    """Rows as strings: "e" the environment's token, "a" the agent's, "." padding."""
    assert scan("eaaee.") == [(0, 1, False), (1, 4, True)]  # what the environment says last is the bootstrap state
    rows = [row.ljust(9, ".") for row in rows]
    real, agent = (torch.tensor([[c in kinds for c in row] for row in rows]) for kinds in ("ea", "a"))
    found, at = find_decisions(real, agent), [(row, *one) for row, text in enumerate(rows) for one in scan(text)]
    here, there = found.state, found.state + 1
    columns = found.row[here], found.position[here], found.position[there], found.last
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == at
    assert torch.equal(found.row[here], found.row[there])
    assert len(found.row) == len(at) + len({row for row, *_ in at})  # one bootstrap state a row that decides
    assert decision_mask(agent).nonzero().tolist() == [[row, place] for row, place, *_ in at]
    assert row_length(real).tolist() == [len(row.rstrip(".")) for row in rows]
    last = [row.rfind("a") for row in rows]  # a model reads what is before it, or one token
    assert until_last_decision(real, agent).sum(-1).tolist() == [
        min(max(end, 1), len(row.rstrip("."))) for end, row in zip(last, rows, strict=True)
    ]
    ended = torch.arange(len(rows)) % 2 == 0
    until = until_last_decision(real, agent, ended)
    assert torch.equal(until[ended], until_last_decision(real, agent)[ended])
    assert torch.equal(until[~ended], real[~ended])
    assert torch.equal(until, until & (until.cumprod(-1) > 0))  # from the beginning, without gaps
