"""Growing rows against lists of tokens that grow one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang.envs.rows import Rows, read_utterance
from torchrl_lang.schema import ControlTokens

CONTROL = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4, end_of_dialogue=5)
WIDTH = 12

token = st.tuples(st.integers(6, 20), st.booleans(), st.booleans())  # id, kept, the agent's


@settings(max_examples=60, deadline=None)
@given(
    st.lists(  # appended pieces, each of two rows of equal width
        st.integers(0, 5).flatmap(lambda n: st.tuples(*[st.lists(token, min_size=n, max_size=n)] * 2)),
        min_size=1,
        max_size=4,
    )
)
def test_append_writes_what_lists_would(pieces):
    rows = Rows.empty(2, WIDTH, pad=0, device=None)
    lists = [[], []]
    for number, piece in enumerate(pieces):
        table = torch.tensor(piece, dtype=torch.int64).reshape(2, len(piece[0]), 3)
        reward = torch.tensor([1.0, 2.0]) + number
        before = rows
        rows, overflow = rows.append(table[..., 0], table[..., 1].bool(), table[..., 2].bool(), reward)
        for row in range(2):
            new = [[tok, agent, 0.0] for tok, keep, agent in piece[row] if keep]
            theirs = [entry for entry in new if entry[1]]
            if theirs:
                theirs[-1][2] = float(reward[row])
            lists[row] = lists[row] + new
            assert bool(overflow[row]) == (len(lists[row]) > WIDTH)
            lists[row] = lists[row][:WIDTH]
        assert before is not rows
    for row in range(2):
        padded = lists[row] + [[0, False, 0.0]] * (WIDTH - len(lists[row]))
        ids, agent, earned = zip(*padded, strict=True)
        assert rows.tokens[row].tolist() == list(ids)
        assert rows.action_mask[row].tolist() == list(agent)
        assert rows.token_reward[row].tolist() == list(earned)
        assert rows.attention_mask[row].sum() == len(lists[row])


def test_append_leaves_the_old_rows_alone():
    rows = Rows.empty(1, 4, pad=0, device=None)
    rows.append(torch.tensor([[7, 8]]), torch.ones(1, 2).bool(), torch.ones(1, 2).bool(), torch.ones(1))
    assert rows.length.item() == 0
    assert not rows.tokens.any()


def test_where_mixes_whole_rows():
    one, other = (Rows.empty(2, 3, pad=pad, device=None) for pad in (7, 9))
    mixed = one.where(torch.tensor([True, False]), other)
    assert mixed.tokens.tolist() == [[7, 7, 7], [9, 9, 9]]


def test_read_utterance_table():
    end, pad = CONTROL.end_of_action, CONTROL.pad
    table = [  # action, length, closed by the agent
        ([8, 9, end], 2, True),
        ([8, end, 9], 1, True),  # what stands behind the end is ignored
        ([end, 8, 9], 0, True),
        ([8, 9, 7], 3, False),  # no end: the environment closes it
        ([8, pad, end], 1, False),  # padding ends it, too
        ([pad, pad, pad], 0, True),  # nothing at all: a bare end of action
        ([8, 9, 5], 3, False),  # another control token is a token
    ]
    actions, lengths, closed = zip(*table, strict=True)
    read = read_utterance(torch.tensor(actions), CONTROL)
    assert read.length.tolist() == list(lengths)
    assert read.closed.tolist() == list(closed)
    assert read.tokens.tolist() == [list(action) for action in actions]
