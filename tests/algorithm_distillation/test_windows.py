"""Windows of learning histories: all of them, from one stream, of whole episodes in order, resumable."""

from collections import Counter

import pytest
import torch

from tests.algorithm_distillation.conftest import source
from torchrl_lang.algorithm_distillation import (
    HistoryWindows,
    HistoryWriter,
    LearningHistory,
    load_history,
    split_tasks,
)


def kept_steps(history, task, stream, skip, remainder):
    """The steps of one stream, in order, whose episode leaves a remainder; in a plain loop."""
    episode = history.steps["episode"][task, stream].tolist()
    return [step for step, number in enumerate(episode) if number % skip == remainder]


def all_windows(history, length, skip=1, at_episode_start=False, tasks=range(3)):
    """Every window as (task, stream, steps), in plain loops."""
    found = Counter()
    for task in tasks:
        for stream in range(2):
            for remainder in range(skip):
                steps = kept_steps(history, task, stream, skip, remainder)
                for first in range(len(steps) - length + 1):
                    if at_episode_start and history.steps["episode_step"][task, stream, steps[first]] != 0:
                        continue
                    found[(task, stream, *steps[first : first + length])] += 1
    return found


def located(history, index):
    """Windows of indices as (task, stream, steps); fails if one crosses a stream."""
    places = {
        number: place
        for place, number in (
            ((task, stream, step), int(history.flat_index()[task, stream, step]))
            for task in range(3)
            for stream in range(2)
            for step in range(history.recorded)
        )
    }
    for window in index.tolist():
        steps = [places[number] for number in window]
        assert len({place[:2] for place in steps}) == 1, "crosses a stream"
        yield (*steps[0][:2], *(place[2] for place in steps))


@pytest.mark.parametrize(
    ("length", "skip", "at_episode_start"), [(1, 1, False), (4, 2, True), (13, 3, False), (13, 1, True)]
)
def test_an_epoch_is_every_window_once(history, length, skip, at_episode_start):
    windows = HistoryWindows(history, length, skip_episodes=skip, at_episode_start=at_episode_start)
    found = Counter()
    for batch in windows.buffer(8):
        found.update(located(history, batch["index"]))
    assert found == all_windows(history, length, skip, at_episode_start)
    assert found.total() == len(windows)


def test_unfinished_histories_have_windows_of_recorded_steps_only(tmp_path):
    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 100) as writer:
        writer.extend(made.history())
    history = load_history(tmp_path, unfinished=True)
    found = Counter()
    for batch in HistoryWindows(history, 9, skip_episodes=2).buffer(32):
        found.update(located(history, batch["index"]))
    assert found == all_windows(history, 9, skip=2)


def test_the_order_depends_on_the_seed_and_is_resumed(history):
    def take(buffer, batches):
        return [buffer.sample()["index"] for _ in range(batches)]

    first = take(HistoryWindows(history, 10, seed=1).buffer(30), 25)  # over two epochs
    assert all(map(torch.equal, first, take(HistoryWindows(history, 10, seed=1).buffer(30), 25)))
    assert not torch.equal(first[0], HistoryWindows(history, 10, seed=2).buffer(30).sample()["index"])
    running = HistoryWindows(history, 10, seed=1).buffer(30)
    take(running, 13)
    state = running.sampler.state_dict()
    resumed = HistoryWindows(history, 10, seed=9).buffer(30)
    resumed.sampler.load_state_dict(state)
    assert all(map(torch.equal, first[13:], take(resumed, 12)))


def test_windows_by_hand():
    # One stream: episodes of steps 0-2, 3-4, 5-7 and 8 (unfinished).
    made = source(steps=9)
    steps = made.history()[:1, :1].clone()
    steps["episode"][:] = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3])
    steps["episode_step"][:] = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 0])
    steps["done"][:] = torch.tensor([0, 0, 1, 0, 1, 0, 0, 1, 0]).bool()[:, None]
    steps["terminated"][:] = False
    history = LearningHistory(steps, made.tasks[:1])

    def windows(length, **options):
        return sorted(HistoryWindows(history, length, **options).buffer(99).sample()["index"].tolist())

    assert windows(8) == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert windows(5, skip_episodes=2) == [[0, 1, 2, 5, 6], [1, 2, 5, 6, 7]]
    assert windows(3, skip_episodes=2) == [[0, 1, 2], [1, 2, 5], [2, 5, 6], [3, 4, 8], [5, 6, 7]]
    assert windows(3, skip_episodes=2, at_episode_start=True) == [[0, 1, 2], [3, 4, 8], [5, 6, 7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length must be an integer of at least 1"),
        ({"length": 61}, "No stream has a window of length=61 with skip_episodes=1: the streams have 60 steps"),
        ({"length": 362}, "No stream has a window of length=362"),  # the history has 360 steps in all
        ({"length": 59, "skip_episodes": 2}, "No stream has a window"),
        ({"length": 5, "skip_episodes": 0}, "skip_episodes must be an integer of at least 1"),
        ({"length": 5, "tasks": [2, 3]}, r"numbers of tasks in the history, \[3\] are not"),
        ({"length": 5, "tasks": []}, "numbers of tasks in the history, none are not"),
    ],
)
def test_bad_options(history, options, message):
    with pytest.raises(ValueError, match=message):
        HistoryWindows(history, **options)


# -- a split of tasks -------------------------------------------------------------------------------------------------


def test_parts_are_disjoint_and_complete():
    numbers = torch.arange(100, 181)
    split = split_tasks(numbers, seed=4)
    assert [len(part) for part in split] == [61, 8, 12]
    assert torch.cat(split).sort().values.tolist() == numbers.tolist()
    assert all(part.tolist() == sorted(part.tolist()) for part in split)
    assert split_tasks(numbers, seed=4).test.tolist() == split.test.tolist()
    assert split_tasks(numbers, seed=5).test.tolist() != split.test.tolist()


@pytest.mark.parametrize("shares", [{"validation": 0.5, "test": 0.5}, {"test": -0.1}, {"tasks": [1] * 10}])
def test_bad_shares(shares):
    with pytest.raises(ValueError, match="leave none of 10 different tasks"):
        split_tasks(**{"tasks": 10, **shares})
