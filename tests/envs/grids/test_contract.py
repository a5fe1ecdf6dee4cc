"""Environments with hidden tasks: specs, seeds, resets, rows that are done; rooms and doors against plain loops."""

import itertools
import json

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from tests.envs.grids import reference
from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv, random_bandits
from torchrl_lang.envs.grids.rooms import room_image


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


def played(env, actions):
    """What ``env`` returns for actions ``[N, T]``: position, reward, terminated and truncated of each step."""
    td, rows = env.reset(), []
    for action in actions.unbind(-1):
        td = env.step(td.set("action", action))["next"]
        rows.append([td[key] for key in ("observation", "reward", "terminated", "truncated")])
    return [torch.stack(column, 1) for column in zip(*rows, strict=True)]


def assert_rows(columns, row, expected, place=lambda state: state):
    """Compare one row of a batch with the reference's episode; after its end nothing may change."""
    observation, reward, terminated, truncated = (column[row].squeeze(-1).tolist() for column in columns)
    for step, (state, earned, ended, cut) in enumerate(expected):
        found = (tuple(observation[step]), reward[step], terminated[step], truncated[step])
        assert found == (place(state), earned, ended, cut), step
    last = expected[-1]
    for step in range(len(expected), len(reward)):
        found = (tuple(observation[step]), reward[step], terminated[step], truncated[step])
        assert found == (place(last[0]), 0, *last[2:]), step


def random_actions(rows, steps, seed=0):
    return torch.randint(5, (rows, steps), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reward", ["every_step", "once"])
@pytest.mark.parametrize("start", [(1, 1), (0, 2)])
def test_dark_room_is_that_of_plain_loops(reward, start):
    env = DarkRoomEnv(3, start=start, reward=reward, episode_length=12, task=torch.arange(9), batch_size=9)
    actions = random_actions(9, 15)
    columns = played(env, actions)
    for task, goal in enumerate(reference.cells(3)):
        step = reference.room_step(3, goal, reward == "once")
        assert_rows(columns, task, reference.play(step, start, actions[task].tolist(), 12))


def test_dark_key_door_is_that_of_plain_loops():
    env = DarkKeyDoorEnv(2, start=(0, 0), episode_length=12, task=torch.arange(16), batch_size=16)
    actions = random_actions(16, 15, seed=3)
    columns = played(env, actions)
    pairs = list(itertools.product(reference.cells(2), repeat=2))
    ends = set()
    for task, (key, door) in enumerate(pairs):
        assert env.describe_task(task) == {"task": task, "key": list(key), "door": list(door)}
        assert env.task_number(key, door) == task
        expected = reference.play(reference.key_door_step(2, key, door), ((0, 0), False), actions[task].tolist(), 12)
        ends.add(expected[-1][2:])
        assert_rows(columns, task, expected, place=lambda state: state[0])
    assert ends == {(True, False), (False, True)}  # terminated, and truncated


@pytest.mark.parametrize("symmetry", range(8))
def test_an_image_of_steps_is_steps_in_the_image_of_a_room(symmetry):
    generator = torch.Generator().manual_seed(symmetry)
    cells = [tuple(cell) for cell in torch.randint(4, (3, 2), generator=generator).tolist()]  # start, key, door
    actions = random_actions(1, 60, seed=symmetry)

    def image(place):
        row, column = (3 - number if symmetry & bit else number for number, bit in zip(place, (1, 2), strict=True))
        return (column, row) if symmetry & 4 else (row, column)

    def steps(cells, actions):
        start, key, door = cells
        task = DarkKeyDoorEnv(4).task_number(key, door)
        return played(DarkKeyDoorEnv(4, start=start, task=task, episode_length=60, batch_size=1), actions)

    position, *others = steps(cells, actions)
    position, actions = room_image(position, actions, torch.tensor(symmetry), 4)
    expected = steps([image(cell) for cell in cells], actions)
    assert all(map(torch.equal, [position, *others], expected))


@pytest.mark.parametrize("reward", ["every_step", "once"])
@pytest.mark.parametrize("start", ["centre", "random", (0, 3)])
def test_optimal_return_of_dark_room_is_that_of_exhaustive_search(reward, start):
    length = 4
    env = DarkRoomEnv(4, start=start, reward=reward, episode_length=length)
    starts = {"centre": [(2, 2)], "random": reference.cells(4)}.get(start, [start])
    for task, goal in enumerate(reference.cells(4)):
        step = reference.room_step(4, goal, reward == "once")
        best = [reference.best_return(step, cell, length) for cell in starts]
        assert env.optimal_return(torch.tensor(task)).item() == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize("start", ["random", (0, 0)])
@pytest.mark.parametrize("length", [2, 4])
def test_optimal_return_of_dark_key_door_is_that_of_exhaustive_search(start, length):
    env = DarkKeyDoorEnv(3, start=start, episode_length=length)
    starts = reference.cells(3) if start == "random" else [start]
    optimal = env.optimal_return(torch.arange(81))
    for task, (key, door) in enumerate(itertools.product(reference.cells(3), repeat=2)):
        step = reference.key_door_step(3, key, door)
        best = [reference.best_return(step, (cell, False), length) for cell in starts]
        assert optimal[task].item() == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize(
    "env",
    [
        DarkRoomEnv(5, reward="once", task=torch.arange(25), batch_size=25, seed=0),
        DarkKeyDoorEnv(3, start="centre", task=torch.arange(81), batch_size=81, episode_length=9, seed=0),
    ],
)
def test_every_choice_among_optimal_actions_earns_the_optimal_return(env):
    generator = torch.Generator().manual_seed(0)
    td, total = env.reset(), 0
    for _ in range(env.episode_length):
        choice = torch.multinomial(env.optimal_actions().float(), 1, generator=generator).squeeze(-1)
        td = env.step(td.set("action", choice))["next"]
        total = total + td["reward"].squeeze(-1)
    torch.testing.assert_close(total, env.optimal_return())
