"""Dark Room and Dark Key-to-Door against plain loops, and numbers worked out by hand."""

import itertools

import pytest
import torch

from tests.envs.grids import reference
from torchrl_lang.envs.grids import DarkKeyDoorEnv, DarkRoomEnv


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
