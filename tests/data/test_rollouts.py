from __future__ import annotations

import pytest
import torch

from torchrl_lang.data import rows_from_rollout
from torchrl_lang.data.rollouts import episode_numbers
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import from_row


def act(td):
    """A policy without a random stream: what it says hangs on the row."""
    written = td["attention_mask"].sum(-1, keepdim=True)
    return td.set("action", (written + torch.arange(4)) % 4)


def test_the_last_observation_of_an_episode_is_its_row(talk):
    env = talk(seed=0, batch_size=[3], row_length=40)
    rollout = env.rollout(12, act, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    place = rollout["next", "done"].squeeze(-1).nonzero().tolist()
    assert rows.shape == (len(place),)
    assert len(place) > 3
    for row, (env_index, time) in zip(rows.unbind(0), place, strict=True):
        for key in (*ROW_KEYS, "terminated", "truncated"):
            assert torch.equal(row[key], rollout[env_index, time]["next", key])
        assert from_row(row, env.tokenizer).terminated


def test_unfinished_episodes_are_dropped_or_marked(talk):
    env = talk(seed=0, batch_size=[3], row_length=40, patience=1_000)
    rollout = env.rollout(2, act, break_when_any_done=False)
    assert rows_from_rollout(rollout, unfinished="drop").shape == (0,)
    rows = rows_from_rollout(rollout, unfinished="truncate")
    assert rows["truncated"].flatten().tolist() == [True] * 3
    assert not rows["terminated"].any()
    assert torch.equal(rows["tokens"], rollout[:, -1]["next", "tokens"])
    with pytest.raises(ValueError, match="unfinished='ignore' is unknown"):
        rows_from_rollout(rollout, unfinished="ignore")


def test_repeated_last_steps_give_no_second_row(talk):
    env = talk(seed=0, batch_size=[8], row_length=40)
    rollout = env.rollout(12, act, break_when_all_done=True)
    assert rollout["next", "done"].sum() > 8
    assert rows_from_rollout(rollout, unfinished="drop").shape == (8,)


def test_steps_after_the_end_give_no_second_row(talk):
    env = talk(seed=0, batch_size=[8], row_length=40)
    now, steps = env.reset(), []
    for _ in range(6):
        steps.append(env.step(act(now)).clone())
        now = steps[-1]["next"].exclude("reward")
    rollout = torch.stack(steps, 1)
    assert rollout["next", "done"].sum() > 8
    assert rows_from_rollout(rollout, unfinished="drop").shape == (8,)


def test_equal_episodes_of_one_turn_are_all_kept(talk):
    """With one turn, one opening and one policy there is only one episode; it is still played six times by each."""
    env = talk(seed=0, batch_size=[2], patience=1, max_opening=0, max_reply=0, row_length=40)
    rollout = env.rollout(6, act, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    assert rows.shape == (12,)
    assert (rows["tokens"] == rows["tokens"][0]).all()


def test_rows_do_not_share_memory_with_the_rollout(talk):
    rollout = talk(seed=0, batch_size=[3], row_length=40).rollout(12, act, break_when_any_done=False)
    rows = rows_from_rollout(rollout, unfinished="drop")
    before = rows.clone()
    rollout["next", "tokens"].zero_()
    rollout["next", "done"].zero_()
    assert (rows == before).all()


def test_a_rollout_of_something_else_is_named(talk):
    rollout = talk(seed=0).rollout(2, act).exclude(("next", "token_reward"))
    with pytest.raises(KeyError, match="token_reward"):
        rows_from_rollout(rollout, unfinished="drop")


@pytest.mark.parametrize("key", ["reward", "token_reward"])
def test_a_reward_that_is_not_finite_is_refused(talk, key):
    rollout = talk(seed=0, batch_size=[3], row_length=40).rollout(12, act, break_when_any_done=False)
    agent = rollout["next", "agent_mask"]
    rollout["next", key] = torch.where(agent.any(-1, keepdim=True) if key == "reward" else agent, torch.inf, 0.0)
    with pytest.raises(ValueError, match="a reward that is not finite"):
        rows_from_rollout(rollout, unfinished="drop")


def test_episodes_are_numbered_as_they_begin():
    """Three environments; a column is one environment, a row one step."""
    done = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    expected = [[0, 1, 2], [0, 3, 2], [4, 3, 2], [4, 5, 6]]
    playing, begun = torch.arange(3), torch.tensor(3)
    number, after, total = episode_numbers(done, playing, begun)
    assert number.tolist() == expected
    assert (after.tolist(), int(total)) == ([4, 5, 6], 7)
    first, playing, begun = episode_numbers(done[:2], playing, begun)
    second, playing, begun = episode_numbers(done[2:], playing, begun)
    assert torch.cat([first, second]).tolist() == expected
