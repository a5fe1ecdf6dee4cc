"""Growing rows against lists of tokens that grow one by one."""

from __future__ import annotations

import torch

from torchrl_lang.envs import WordleEnv
from torchrl_lang.envs.row_state import GrowingRows, Reply, Rows, Utterance, read_utterance
from torchrl_lang.schema import ControlTokens

CONTROL = ControlTokens(pad=0, end_of_action=1, end_of_state=2, begin_state=3, begin_action=4, end_of_dialogue=5)
WIDTH = 12


def test_a_turn_token_by_token():
    table = [  # utterance, length, closed, reply, length, terminated, live: what is appended, whose it is, where reward
        ([8, 9], 2, True, [11, 12], 2, False, True, [8, 9, 1, 11, 12, 2], [1, 1, 1, 0, 0, 0], 2),
        ([8, 9], 1, True, [11, 12], 1, True, True, [8, 1, 11, 2, 5], [1, 1, 0, 0, 0], 1),
        ([8, 9], 2, False, [11, 12], 0, False, True, [8, 9, 1], [1, 1, 0], 1),
        ([8, 9], 0, True, [11, 12], 0, True, True, [1, 5], [1, 0], 0),
        ([8, 9], 2, True, [11, 12], 2, True, False, [], [], None),
    ]
    said, length, closed, replied, reply_length, ended, live, tokens, agent, at = map(list, zip(*table, strict=True))
    empty = torch.zeros(5, WIDTH, dtype=torch.int64)
    rows = GrowingRows(Rows(empty, empty.bool(), empty.float(), empty[:, 0]), WIDTH)
    utterance = Utterance(torch.tensor(said), torch.tensor(length), torch.tensor(closed))
    reply = Reply(torch.tensor(replied), torch.tensor(reply_length), torch.full((5,), -3.0), torch.tensor(ended))
    writes, overflow = rows.plan_turn(utterance, reply, torch.tensor(live), CONTROL)
    assert not rows.rows.length.any()  # a plan touches nothing
    rows.write_(writes)
    assert not overflow.any()
    for row in range(5):
        rest = WIDTH - len(tokens[row])
        assert rows.rows.tokens[row].tolist() == tokens[row] + [0] * rest
        assert rows.rows.agent_mask[row].tolist() == [bool(a) for a in agent[row]] + [False] * rest
        assert rows.rows.token_reward[row].nonzero().flatten().tolist() == ([] if at[row] is None else [at[row]])
        assert rows.rows.length[row] == len(tokens[row])


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


def test_an_environment_outlives_inference_mode():
    env = WordleEnv(["crane", "slate"], batch_size=[3], seed=0)
    with torch.inference_mode():
        env.reset()
        env.rollout(2)
    rows = env.rollout(2)
    assert not rows["tokens"].is_inference()
    with torch.inference_mode():
        assert env.reset()["tokens"].shape == (3, env.row_length)
