"""Families of tasks: how many they have, and which are trained on, validated on and reported."""

import itertools

import pytest
import torch

from torchrl_lang.envs.grids import BernoulliBanditEnv, DarkKeyDoorEnv, DarkRoomEnv, random_bandits
from torchrl_lang.recipes.algorithm_distillation.families import FamilyOptions, TaskFamily

FAMILIES = {
    "dark_room": {"size": 5},
    "random_start": {"size": 5, "start": "random"},
    "dark_key_door": {"env": "dark_key_door", "size": 3},
    "bandit": {"env": "bandit", "arms": 3, "tasks": 40},
}


@pytest.fixture(params=FAMILIES)
def options(request):
    return FAMILIES[request.param]


def numbers(**options):
    """All tasks of a family, in the order of their numbers."""
    return torch.cat(list(FamilyOptions(**options).family().split)).sort().values.tolist()


def test_the_parts_of_a_split_are_disjoint(options):
    split = FamilyOptions(**options).family().split
    for one, other in itertools.combinations(split, 2):
        assert not set(one.tolist()) & set(other.tolist())
    assert len(set(numbers(**options))) == sum(map(len, split))


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, [36, 5, 7]),  # 48 goals: 4.8 and 7.2 of them, rounded
        ({"size": 9}, [60, 8, 12]),
        ({"size": 9, "start": "random"}, [61, 8, 12]),
        ({"size": 9, "tasks": 20}, [15, 2, 3]),
        ({"env": "dark_key_door", "size": 3}, [61, 8, 12]),
        ({"env": "dark_key_door"}, [750, 100, 150]),
        ({"env": "bandit"}, [750, 100, 150]),
        ({"env": "bandit", "tasks": 10, "validation": 0.3, "test": 0.4}, [3, 3, 4]),
    ],
)
def test_numbers_of_tasks(options, parts):
    assert [len(part) for part in FamilyOptions(**options).family().split] == parts


@pytest.mark.parametrize("size", [3, 4, 7])
def test_a_goal_where_each_episode_begins_is_left_out(size):
    env = DarkRoomEnv(size)
    env.reset()
    centre = env.state.item()
    assert numbers(size=size) == [cell for cell in range(size**2) if cell != centre]
    assert numbers(size=size, start="random") == list(range(size**2))


def test_tasks_are_drawn_among_all():
    drawn = numbers(size=9, tasks=30)
    assert len(set(drawn)) == 30
    assert 40 not in drawn
    assert max(drawn) > 60
    assert numbers(size=9, tasks=30, split_seed=1) != drawn
    keys = [task // 49 for task in numbers(env="dark_key_door", size=7)]
    assert len(set(keys)) == 49  # keys in all cells


def test_the_same_options_give_the_same_split(options):
    one, again = (FamilyOptions(**options).family() for _ in range(2))
    other = FamilyOptions(**options, split_seed=1).family()
    assert one.describe() == again.describe()
    assert not torch.equal(one.split.test, other.split.test)


@pytest.mark.parametrize(
    ("options", "kind", "length"),
    [
        ({"size": 5}, DarkRoomEnv, 20),
        ({"env": "dark_key_door", "size": 3}, DarkKeyDoorEnv, 50),
        ({"env": "bandit"}, BernoulliBanditEnv, 10),
        ({"size": 5, "episode_length": 7}, DarkRoomEnv, 7),
    ],
)
def test_environments_have_one_task_in_each_row(options, kind, length):
    family = FamilyOptions(**options).family()
    env = family.env(family.split.test, 3)
    assert type(env) is kind
    assert env.episode_length == length
    assert torch.equal(env.fixed_task, family.split.test[:, None].expand(-1, 3))


def test_options_reach_the_environment():
    family = FamilyOptions(env="dark_key_door", size=4, start="random").family()
    env = family.env(family.split.train, 1)
    assert (env.size, env.start) == (4, "random")
    bandit = FamilyOptions(env="bandit", arms=4, tasks=50, split_seed=3).family()
    described = bandit.env(bandit.split.test[:1], 1).describe_task(int(bandit.split.test[0]))
    expected = random_bandits(50, 4, seed=3)[bandit.split.test[0]]
    assert described["probabilities"] == pytest.approx(expected.tolist())


def test_the_description_has_the_family_and_its_split():
    about = FamilyOptions(size=3, episode_length=4).family().describe()
    assert (about["env"], about["size"], about["start"], about["episode_length"]) == ("DarkRoomEnv", 3, "centre", 4)
    assert sorted(about["train"] + about["validation"] + about["test"]) == [0, 1, 2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "3 tasks leave none for validation and test: give more tasks, or larger shares"),
        ({"tasks": 4}, "4 tasks leave none for validation: give"),
        ({"size": 3, "tasks": 9}, "tasks must be at most 8 in this room of size=3, got 9"),
        ({"size": 3, "tasks": 82, "env": "dark_key_door"}, "tasks must be at most 81 in this room of size=3, got 82"),
        ({"validation": 0.6, "test": 0.5}, "leave none of 48 tasks to train on"),
        ({"env": "maze"}, "--env should be"),
        ({"start": "corner"}, "--start should be"),
        ({"size": 1}, "--size should be"),
        ({"test": 0.0}, "--test should be"),
        ({"episode_length": 0}, "--episode-length should be"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        FamilyOptions(**options).family()


def test_an_unknown_family():
    with pytest.raises(ValueError, match="env='maze' is unknown"):
        TaskFamily("maze", 5, 3, "centre", 2, torch.arange(20), {"seed": 0})
