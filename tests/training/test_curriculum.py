"""The draws of a curriculum: by hand, alike within groups, and after loading."""

import pytest
import torch

from torchrl_lang.envs.games import CorridorEnv
from torchrl_lang.training.curriculum import FLOOR, Curriculum


def test_a_curriculum_needs_starts_that_can_be_given():
    env = CorridorEnv(2, batch_size=[2], group_size=1, seed=0)
    with pytest.raises(ValueError, match="CorridorEnv has 1"):
        Curriculum(env, 5)
    with pytest.raises(ValueError, match="CorridorEnv has 1"):
        Curriculum(CorridorEnv(5, start=0, batch_size=[2], group_size=1, seed=0), 5)
    assert len(Curriculum(CorridorEnv(3, batch_size=[2], group_size=1, seed=0), 5).values) == 2
    env._reset_entries = ()
    with pytest.raises(ValueError, match="whose starts can be given in reset: CorridorEnv has 0"):
        Curriculum(env, 5)


def test_rows_of_other_groups_are_refused():
    with pytest.raises(ValueError, match="give CorridorEnv a group_size"):
        Curriculum(CorridorEnv(4, batch_size=[2], seed=0), 5)
    env = CorridorEnv(4, batch_size=[4], group_size=2, seed=0)
    curriculum = Curriculum(env, 5)
    rows = env.reset()
    with pytest.raises(KeyError, match="A row needs 'group'"):
        curriculum.update(rows.exclude("group"))
    curriculum.clear()
    with pytest.raises(ValueError, match="2 of the 2 groups of the rows were not drawn here, or before clear"):
        curriculum.update(rows)


def rows_of(env, returns):
    """The rows that begin now, with a return for each place at the first agent token."""
    rows = env.reset()
    rows["agent_mask"][:, 3] = True
    rows["token_reward"][:, 3] = returns(rows["tokens"][:, 1])
    return rows


def test_weights_of_a_curriculum_by_hand():
    """Of three starts the returns of the first are 0 and 1 alike often, those of the others equal."""
    env = CorridorEnv(4, batch_size=[300], group_size=2, seed=0)
    curriculum = Curriculum(env, 10)
    assert torch.equal(curriculum.weights(), torch.ones(3, dtype=torch.float64) / 3)
    rows = rows_of(env, lambda place: torch.where(place == 0, torch.arange(300) % 2, 5.0))
    curriculum.update(rows)
    number = torch.bincount(rows["tokens"][:, 1]).double()
    variance = torch.tensor([0.25, 0.0, 0.0], dtype=torch.float64)
    mean = (number * variance).sum() / number.sum()
    found = (number * variance + 4 * mean) / (number + 4)
    torch.testing.assert_close(curriculum.weights(), (1 - FLOOR) * found / found.sum() + FLOOR / 3)
    drawn = torch.bincount(env.reset()["tokens"][:, 1], minlength=3) / 300
    assert (drawn - curriculum.weights()).abs().max() < 0.12  # 150 groups: three standard errors
    rows = rows_of(env, lambda place: torch.full((300,), 5.0))
    curriculum.update(rows)
    assert curriculum.weights()[0] > 1 / 3  # earlier returns fade, but slowly
    kept, more = 0.9 * float(number[0]), int((rows["tokens"][:, 1] == 0).sum())  # earlier returns count less
    total, square = kept / 2 + 5 * more, kept / 2 + 25 * more
    assert curriculum.state_dict()["sums"][:, 0].tolist() == pytest.approx([kept + more, total, square])


def test_a_group_begins_alike_although_the_weights_change_and_after_loading():
    """Games of a group may begin in different steps."""
    env = CorridorEnv(9, batch_size=[6], group_size=4, seed=0)
    curriculum = Curriculum(env, 10)
    curriculum.update(rows_of(env, lambda place: torch.arange(6.0)))  # the second group has begun with two
    state = curriculum.state_dict()
    again = CorridorEnv(9, batch_size=[6], group_size=4, seed=0)
    other = Curriculum(again, 10)
    other.load_state_dict(state)
    assert torch.equal(other.weights(), curriculum.weights())
    begun, first = dict(state["begun"].tolist()), env.reset()
    again.reset()
    assert torch.equal(first["tokens"], again.reset()["tokens"])
    assert [begun[group] for group in first["group"][:2].tolist()] == first["tokens"][:2, 1].tolist()
