"""Histories to train on: windows that resume exactly, and that no task of validation or test is in."""

from functools import partial

import pytest
import torch

from tests.recipes.commands import assert_same
from torchrl_lang.algorithm_distillation import LearningHistory, record_history
from torchrl_lang.algorithm_distillation.sources import UCB, NoisyExpert, PosteriorSampling, QLearning
from torchrl_lang.envs.grids import DarkRoomEnv, random_bandits
from torchrl_lang.envs.grids.rooms import room_image
from torchrl_lang.recipes.algorithm_distillation.histories import (
    FamilyOptions,
    HistoryOptions,
    TaskFamily,
    history_windows,
    skipped,
    source_on,
)
from torchrl_lang.schema import OBSERVATION, REWARD

LENGTH, EVERY, BATCH = 12, 5, 7
SMALL = {"size": 3, "episode_length": 6, "streams": 3, "fresh_every": EVERY}
FAMILIES = {
    "noise": {"source": "noise"},
    "q_learning": {"source": "q_learning", "history_episodes": 12, "skip_episodes": 3},
    "expert": {"source": "expert"},
    "key_door": {"env": "dark_key_door", "tasks": 20, "history_episodes": 12, "skip_episodes": 3},
    "ucb": {"env": "bandit", "tasks": 20, "arms": 4},
}


def windows_of(seed=0, **options):
    return history_windows(HistoryOptions(**{**SMALL, **options}), length=LENGTH, batch_size=BATCH, seed=seed)


@pytest.fixture
def drawn(monkeypatch):
    """The histories that are drawn from now on."""
    found = []

    def kept(*arguments, **options):
        found.append(LearningHistory(*arguments, **options))
        return found[-1]

    monkeypatch.setattr("torchrl_lang.recipes.algorithm_distillation.histories.LearningHistory", kept)
    return found


@pytest.mark.parametrize("done", [EVERY, 2 * EVERY + 3])
def test_windows_resume_exactly(done):
    """In the middle of a block, and at its border."""
    windows = partial(windows_of, seed=3, source="noise")
    whole = windows()
    batches = [whole.sample() for _ in range(3 * EVERY + 1)]
    begun = windows()
    for _ in range(done):
        begun.sample()
    resumed = windows()
    resumed.sample()  # a state replaces what was before
    resumed.load_state_dict(begun.state_dict())
    for expected in batches[done:]:
        assert_same(resumed.sample(), expected)


@pytest.mark.parametrize("name", ["q_learning", "ucb"])
def test_windows_have_the_training_tasks_and_no_others(name, drawn):
    options = HistoryOptions(**{**SMALL, **FAMILIES[name]})
    windows = history_windows(options, length=LENGTH, batch_size=BATCH, seed=0)
    batches = [windows.sample() for _ in range(EVERY + 2)]
    split = TaskFamily(options).split
    assert len(drawn) == 2
    for history in drawn:
        assert history.task_numbers.tolist() == split.train.tolist()
    for batch, history in zip(batches, [drawn[0]] * EVERY + [drawn[1]] * 2, strict=True):
        steps = history.flat[batch["index"]]
        assert all(torch.equal(batch[key], steps[key]) for key in (OBSERVATION, "action", REWARD))


@pytest.mark.parametrize(
    ("options", "kind", "steps", "kept"),
    [
        ({}, PosteriorSampling, 12 * 6, 1),
        ({"source": "noise"}, NoisyExpert, 12 * 6, 1),
        ({"source": "q_learning"}, QLearning, 600 * 6, 40),
        ({"env": "dark_key_door", "tasks": 20}, PosteriorSampling, 12 * 6, 1),
        ({"env": "bandit", "tasks": 20}, UCB, 20 * 6, 1),
        ({"history_episodes": 4, "skip_episodes": 2}, PosteriorSampling, 4 * 6, 2),
    ],
)
def test_the_source_of_each_family(options, kind, steps, kept):
    made = HistoryOptions(**{**SMALL, **options})
    family = TaskFamily(made)
    env = family.env(family.split.train, 2)
    source = source_on(made, env, seed=7)
    assert (type(source), source.steps, source.seed, skipped(made)) == (kind, steps, 7, kept)
    assert source_on(made, env, seed=7, episodes=3).steps == max(steps, 3 * 6)
    assert source_on(made, env, seed=7, episodes=700).steps == 700 * 6


def recorded(folder, which="all", **options):
    """A folder with a history of the training tasks, the held-out ones, or all of them."""
    made = HistoryOptions(**{**SMALL, **options})
    split = TaskFamily(made).split
    held_out = torch.cat([split.validation, split.test])
    numbers = {"train": split.train, "held_out": held_out, "all": torch.cat([held_out, split.train])}[which]
    return record_history(folder, source_on(made, TaskFamily(made).env(numbers, 2), seed=5))


@pytest.mark.parametrize("name", ["q_learning", "ucb"])
def test_a_recorded_history_is_used_without_its_held_out_tasks(name, tmp_path, drawn):
    options = FAMILIES[name]
    history = recorded(tmp_path / "history", **options)
    windows = windows_of(**options, history=tmp_path / "history")
    split = TaskFamily(HistoryOptions(**{**SMALL, **options})).split
    kept = [history.task_numbers.tolist().index(task) for task in split.train.tolist()]
    steps = history.steps[kept].reshape(-1)
    for _ in range(2 * EVERY):
        batch = windows.sample()
        expected = steps[batch["index"]]
        assert all(torch.equal(batch[key], expected[key]) for key in (OBSERVATION, "action", REWARD, "episode"))
    assert [found.task_numbers.tolist() for found in drawn] == [split.train.tolist()]


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"size": 4}, {}, "recorded with .*'size': 4.*, but these options give .*'size': 3"),
        (FAMILIES["key_door"], {}, "recorded with .*DarkKeyDoorEnv.*, but these options give .*DarkRoomEnv"),
        (FAMILIES["ucb"], {**FAMILIES["ucb"], "split_seed": 1}, "recorded with .*'probabilities'.*, but these options"),
        ({"which": "held_out"}, {}, r"has none of the tasks to train on, \[0"),
        (FAMILIES["q_learning"], {}, "algorithm QLearning with noise, but source=posterior"),
        (FAMILIES["noise"], FAMILIES["expert"], "with noise, but source=expert"),
        (FAMILIES["expert"], FAMILIES["noise"], "without noise, but source=noise"),
    ],
)
def test_other_histories_are_refused(before, now, message, tmp_path):
    recorded(tmp_path / "history", **before)
    with pytest.raises(ValueError, match=message):
        windows_of(**now, history=tmp_path / "history")


@pytest.mark.parametrize("is_recorded", [False, True])
def test_symmetries_change_from_stream_to_stream_and_when_histories_are_replaced(is_recorded, tmp_path, drawn):
    history = tmp_path / "history" if is_recorded else None
    if history is not None:
        recorded(history)
    windows = windows_of(history=history, symmetries=True)
    for _ in range(2 * EVERY):
        batch = windows.sample()
    *plain, turned = drawn
    before = plain[0 if is_recorded else -1].steps
    streams = before.shape[:2].numel()
    for stream, (one, other) in enumerate(zip(before.flatten(0, 1), turned.steps.flatten(0, 1), strict=True)):
        expected = room_image(one[OBSERVATION], one["action"], torch.tensor((stream + 1) % 8), size=3)
        assert all(map(torch.equal, expected, (other[OBSERVATION], other["action"])))
        assert torch.equal(one[REWARD], other[REWARD])
    assert len(drawn) == (3 if is_recorded else 4)
    assert streams > 8
    assert torch.equal(batch[OBSERVATION], turned.flat[batch["index"]][OBSERVATION])


def test_rooms_without_symmetries():
    with pytest.raises(ValueError, match="env=bandit has none: leave --symmetries out"):
        HistoryOptions(env="bandit", symmetries=True)
    with pytest.raises(ValueError, match="even size=4 has no centre to mirror at: give --start random"):
        HistoryOptions(size=4, symmetries=True)
    HistoryOptions(size=4, env="dark_key_door", symmetries=True)


def test_more_tasks_than_a_room_has():
    with pytest.raises(ValueError, match="tasks must be at most 8 in a room of size=3, got 9"):
        windows_of(tasks=9)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, [36, 5, 7]),  # 48 goals: 4.8 and 7.2 of them, rounded
        ({"size": 9, "start": "random"}, [61, 8, 12]),
        ({"size": 9, "tasks": 20}, [15, 2, 3]),
        ({"env": "dark_key_door", "size": 3}, [61, 8, 12]),
        ({"env": "bandit"}, [750, 100, 150]),
        ({"env": "bandit", "tasks": 10, "validation": 0.3, "test": 0.4}, [3, 3, 4]),
    ],
)
def test_numbers_of_tasks(options, parts):
    assert [len(part) for part in TaskFamily(FamilyOptions(**options)).split] == parts


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("start", ["centre", "random"])
def test_a_goal_where_each_episode_begins_is_left_out(size, start):
    env = DarkRoomEnv(size)
    env.reset()
    centre = env.state.item() if start == "centre" else None
    found = torch.cat(list(TaskFamily(FamilyOptions(size=size, start=start)).split)).sort().values.tolist()
    assert found == [cell for cell in range(size**2) if cell != centre]


def test_options_reach_the_environment():
    family = TaskFamily(FamilyOptions(env="dark_key_door", size=4))
    env = family.env(family.split.train, 1)
    assert (env.size, env.start) == (4, "random")
    assert TaskFamily(FamilyOptions()).one().start == "centre"
    assert TaskFamily(FamilyOptions(start="random")).one().start == "random"
    bandit = TaskFamily(FamilyOptions(env="bandit", arms=4, tasks=50, split_seed=3))
    described = bandit.env(bandit.split.test[:1], 1).describe_task(int(bandit.split.test[0]))
    expected = random_bandits(50, 4, seed=3)[bandit.split.test[0]]
    assert described["probabilities"] == pytest.approx(expected.tolist())
