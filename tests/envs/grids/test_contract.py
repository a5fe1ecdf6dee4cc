"""What every environment with hidden tasks must do: specs, seeds, resets, and rows that are done."""

import json

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv, random_bandits


def bandit(**kwargs):
    return BernoulliBanditEnv(random_bandits(6, 3, seed=1), episode_length=4, **kwargs)


def room(**kwargs):
    return DarkRoomEnv(3, start="random", episode_length=4, **kwargs)


def room_once(**kwargs):
    return DarkRoomEnv(2, start="random", reward="once", episode_length=4, **kwargs)


def key_door(**kwargs):
    return DarkKeyDoorEnv(2, episode_length=9, **kwargs)


@pytest.fixture(params=[bandit, room, room_once, key_door])
def make(request):
    return request.param


def fixed_actions(env, td):
    """An action that depends on the row and what it reads, so that rows differ."""
    return td["observation"].sum(-1).add(torch.arange(env.batch_size.numel()).view(env.batch_size)) % env.n_actions


@pytest.mark.parametrize("batch_size", [[], [0], [2, 3]])
def test_specs(make, batch_size):
    check_env_specs(make(batch_size=batch_size, seed=0))


def test_an_episode_of_the_seed_is_the_same_in_any_batch(make):
    many, alone = make(batch_size=6, seed=5), make(batch_size=1, seed=5)
    action = torch.ones(6, dtype=torch.int64)
    together = many.reset()
    step = many.step(together.clone().set("action", action))["next"]
    for row in range(6):
        one = alone.reset()
        assert torch.equal(one["observation"][0], together["observation"][row])
        assert alone.task.item() == many.task[row].item()
        assert torch.equal(alone.step(one.set("action", action[:1]))["next", "reward"][0], step["reward"][row])


def test_partial_resets_begin_new_episodes_in_their_rows_only(make):
    env = make(batch_size=4, seed=0)
    td = env.reset()
    tasks = env.task.clone()
    td = env.step(td.set("action", fixed_actions(env, td)))["next"]
    before = td.clone()
    mask = torch.tensor([False, True, False, True])[:, None]
    after = env.reset(td.set("_reset", mask))
    kept = ~mask.squeeze(-1)
    assert torch.equal(after["observation"][kept], before["observation"][kept])
    assert torch.equal(env.task[kept], tasks[kept])
    # These are episodes 4 and 5 of the seed.
    fresh = make(batch_size=6, seed=0)
    expected = fresh.reset()["observation"][4:]
    assert torch.equal(after["observation"][~kept], expected)
    assert torch.equal(env.task[~kept], fresh.task[4:])


def test_fixed_tasks_stay_over_episodes():
    env = room(task=torch.tensor([[0], [7]]), batch_size=[2, 3], seed=0)
    rollout = env.rollout(12, break_when_any_done=False)
    assert env.task.tolist() == [[0, 0, 0], [7, 7, 7]]
    assert rollout["next", "truncated"].squeeze(-1).sum(-1).tolist() == [[3, 3, 3]] * 2


def test_wrong_uses_and_descriptions(make):
    env = make(batch_size=2, seed=0)
    with pytest.raises(RuntimeError, match="before its first reset"):
        _ = env.task
    action, td = torch.zeros(2, dtype=torch.int64), env.reset()
    for wrong, noun in ((action - torch.tensor([1, 0]), r"got \[-1\]"), (action.float(), "int64")):
        with pytest.raises(ValueError, match=noun):
            env.step(td.clone().set("action", wrong))
    described = json.loads(json.dumps([env.describe(), *(env.describe_task(task) for task in range(env.n_tasks))]))
    assert described[0]["env"] == type(env).__name__
    assert [task["task"] for task in described[1:]] == list(range(env.n_tasks))


@pytest.mark.slow
def test_a_compiled_step_is_the_step_with_partial_resets_too():
    torch._dynamo.reset()  # other tests compile the same code for environments of their own
    eager, compiled = bandit(batch_size=3, seed=0), bandit(batch_size=3, seed=0)
    step = torch.compile(compiled.step, fullgraph=True, backend="eager")
    one, other = eager.reset(), compiled.reset()
    for number in range(2 * eager.episode_length):
        action = eager.action_spec.rand()
        one = eager.step(one.set("action", action))["next"]
        other = step(other.set("action", action))["next"]
        assert (one == other).all()
        if number % 3 == 1:
            mask = torch.tensor([[True], [False], [number % 2 == 0]])
            one, other = (env.reset(td.set("_reset", mask)) for env, td in ((eager, one), (compiled, other)))
            assert (one == other).all()
            one, other = one.exclude("_reset"), other.exclude("_reset")
    with pytest.raises(RuntimeError, match=rf"expects actions in \[0, {eager.n_actions}\)"):
        step(other.set("action", torch.tensor([0, eager.n_actions, 0])))


def test_bandit_rewards_have_the_probabilities_of_their_arms():
    table = torch.tensor([[0.0, 1.0, 0.3]])
    env = BernoulliBanditEnv(table, task=0, batch_size=[3, 400], episode_length=10, seed=0)
    td, total = env.reset(), 0
    arms = torch.arange(3)[:, None].expand(3, 400)
    for _ in range(10):
        td = env.step(td.set("action", arms))["next"]
        total = total + td["reward"].squeeze(-1)
    assert total[0].eq(0).all()
    assert total[1].eq(10).all()
    assert total[2].sum() / 4000 == pytest.approx(0.3, abs=0.04)  # five standard deviations
    assert env.optimal_return().eq(10).all()
    assert env.optimal_actions()[1, 5].tolist() == [False, True, False]
