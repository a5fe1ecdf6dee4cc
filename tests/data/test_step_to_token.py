"""What a policy wrote for each token goes with the token into the row."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_lang.data import rows_from_rollout


def speak(td):
    """Says the letters 0, 1, 2, ... from its place in the row on, each with its own place as its figure."""
    written = td["attention_mask"].sum(-1, keepdim=True)
    place = written + torch.arange(4)
    return td.set("action", place % 4).set("figure", place.float() + 0.5)


def test_each_figure_stands_where_its_token_does(talk):
    env = talk(seed=0, batch_size=[3], row_length=40)
    rollout = env.rollout(12, speak, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop", carry=["figure"])
    place = torch.arange(40).float() + 0.5
    assert len(rows) > 3
    assert rows["agent_mask"].sum() > 20
    assert torch.equal(rows["figure"], torch.where(rows["agent_mask"], place, 0.0))
    without = rows_from_rollout(rollout, unfinished="drop")
    assert torch.equal(rows.exclude("figure").to_tensordict()["tokens"], without["tokens"])
    truncated = rows_from_rollout(rollout, unfinished="truncate", carry=["figure"])
    assert torch.equal(truncated["figure"], torch.where(truncated["agent_mask"], place, 0.0))
    assert len(truncated) >= len(rows)


def test_by_hand():
    """Two episodes one after the other; the second one is still running."""
    attention = torch.tensor([[[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0]]]).bool()
    after = torch.tensor([[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]]).bool()
    agent = torch.tensor([[[0, 1, 1, 0, 0], [0, 1, 1, 0, 1], [0, 1, 0, 0, 0]]]).bool()
    done = torch.tensor([[[False], [True], [False]]])
    step = TensorDict(tokens=torch.arange(15).view(1, 3, 5), attention_mask=after, agent_mask=agent,
                      token_reward=torch.zeros(1, 3, 5), reward=torch.zeros(1, 3, 1), done=done,
                      terminated=done)  # fmt: skip
    said = torch.tensor([[[-1.0, -2.0], [-3.0, 9.0], [-4.0, 9.0]]])
    rollout = TensorDict({"attention_mask": attention, "said": said, "next": step}, batch_size=[1, 3])
    rows = rows_from_rollout(rollout, unfinished="drop", carry=["said"])
    assert rows["said"].tolist() == [[0.0, -1.0, -2.0, 0.0, -3.0]]
    both = rows_from_rollout(rollout, unfinished="truncate", carry=["said"])
    assert both["said"][1].tolist() == [0.0, -4.0, 0.0, 0.0, 0.0]


def test_one_figure_a_step(talk):
    """A policy that writes one token a step writes one figure a step."""
    env = talk(seed=0, batch_size=[3], row_length=40, action_length=1)

    def policy(td):
        place = td["attention_mask"].sum(-1)
        return td.set("action", (place % 4).unsqueeze(-1)).set("figure", place.float() + 0.5)

    rows = rows_from_rollout(env.rollout(12, policy, break_when_any_done=False), unfinished="drop", carry=["figure"])
    assert torch.equal(rows["figure"], torch.where(rows["agent_mask"], torch.arange(40) + 0.5, 0.0))


def test_what_is_not_there_raises(talk):
    env = talk(seed=0, batch_size=[8], row_length=40)
    rollout = env.rollout(12, speak, break_when_any_done=False)
    with pytest.raises(KeyError, match="carry needs 'log_prob'"):
        rows_from_rollout(rollout, unfinished="drop", carry=["log_prob"])
    with pytest.raises(ValueError, match="episodes began before this batch"):
        rows_from_rollout(rollout[:, 1:], unfinished="drop", carry=["figure"])
