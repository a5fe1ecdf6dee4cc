"""Learning histories on disk: read as recorded, resumed after a kill, checked; and their windows."""

import errno
import json
import os
import shutil
from collections import Counter
from functools import reduce
from itertools import product
from operator import getitem

import numpy as np
import pytest
import torch

from tests.algorithm_distillation.conftest import TASKS, source
from tests.kills import kills
from tests.sealed import reseal
from torchrl_lang._files import FileError
from torchrl_lang.algorithm_distillation import (
    HistoryWindows,
    HistoryWriter,
    LearningHistory,
    history_writer,
    load_history,
    record_history,
    split_tasks,
)
from torchrl_lang.algorithm_distillation.history import HistoryManifest
from torchrl_lang.recipes.command_line import describe


def test_a_recorded_history_is_that_of_its_source(tmp_path, q_source):
    recorded = record_history(tmp_path / "history", q_source, part=13)
    assert (recorded.steps == q_source.history()).all()
    loaded = load_history(tmp_path / "history")
    assert (loaded.steps == q_source.history()).all()
    assert loaded.steps.shape == (3, 2, 60)
    assert loaded.tasks == [{"task": 2, "goal": [0, 2]}, {"task": 5, "goal": [1, 2]}, {"task": 7, "goal": [2, 1]}]
    assert loaded.task_numbers.tolist() == TASKS
    about = {"algorithm": "QLearning", "seed": 0, "learning_rate": 0.5, "gamma": 0.9}
    about |= {"decay": {"first": 1, "last": 0.5, "fraction": [0.3, 1.0]}, "env": q_source.env.describe()}
    assert loaded.source == about


@pytest.mark.slow
def test_a_recording_killed_at_any_step_is_resumed(tmp_path, q_source):
    folder, expected = tmp_path / "history", q_source.history()[..., :2].exclude("action_log_prob")
    q_source.steps = 2
    q_source.blocks = lambda part: expected.split(part, -1)  # which need not be played again for each kill
    found = set()
    for _ in kills(lambda: record_history(folder, q_source, part=1), every=3):  # each entry has the same steps
        if (folder / "manifest.json").exists():
            partial = load_history(folder, unfinished=True)
            found.add(partial.recorded)
            assert (partial.steps == expected[..., : partial.recorded]).all()
        assert (record_history(folder, q_source, part=1).steps == expected).all()
        shutil.rmtree(folder)
    assert found == {1, 2}


def test_resuming_with_other_parts(tmp_path, q_source):
    folder, steps = tmp_path / "history", q_source.history()
    with HistoryWriter(folder, q_source.tasks, 2, 60, source=q_source.describe()) as writer:
        writer.extend(steps[..., :17])
    with pytest.raises(ValueError, match="has 17 of 60 planned steps: resume it, or use unfinished=True"):
        load_history(folder)
    partial = load_history(folder, unfinished=True)
    assert partial.steps.shape == (3, 2, 17)
    assert (partial.flat[partial.flat_index()] == steps[..., :17]).all()
    assert (record_history(folder, q_source, part=10).steps == steps).all()
    parts = json.loads((folder / "manifest.json").read_text())["parts"]
    assert [part["steps"] for part in parts] == [17, 3, 10, 10, 10, 10]


def test_another_source_and_folders_of_others_are_refused(tmp_path, q_source):
    folder = tmp_path / "history"
    record_history(folder, q_source)
    other = source("every_step", algorithm=type(q_source))
    with pytest.raises(ValueError, match=r"begun with other \['source'\]"):
        record_history(folder, other)
    with pytest.raises(FileExistsError, match="resume=True"):
        record_history(folder, q_source, resume=False)
    other.describe = q_source.describe  # steps that differ although the description is the same
    with pytest.raises(ValueError, match="is that of another source"):
        record_history(folder, other)
    with pytest.raises(FileExistsError, match="holds something other"), HistoryWriter(tmp_path, [{"task": 0}], 1, 1):
        pass


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    first, second = (HistoryWriter(tmp_path, [{"task": 0}], 1, 1) for _ in range(2))
    with first, pytest.raises(FileExistsError, match="Another process writes in"), second:
        pass
    with second:  # the lock was released
        pass
    with pytest.raises(RuntimeError, match="in a with statement only"):
        second.extend(source(steps=1).history())


@pytest.mark.parametrize("key", ["observation", "terminated"])
def test_a_changed_byte_is_found(tmp_path, key):
    record_history(tmp_path, source(), part=20)
    path = tmp_path / "rows" / f"{key}.memmap"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileError, match=rf"has other \['{key}'\] than it recorded in steps 40 to 60"):
        load_history(tmp_path)
    load_history(tmp_path, verify=False)
    with pytest.raises(FileError, match="has other"):
        record_history(tmp_path, source())
    path.write_bytes(data[:-1])
    with pytest.raises(FileError, match="bytes, expected"):
        load_history(tmp_path, verify=False)
    path.unlink()
    with pytest.raises(FileError, match="is missing"):
        load_history(tmp_path)
    with pytest.raises(FileNotFoundError, match="no learning history"):
        load_history(tmp_path / "rows")


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (("format",), "torchrl_lang rows", "format"),
        (("version",), 2, "version"),
        (("tasks", 0, "task"), 5, "number of its own"),
        (("steps",), 59, "60 of 59 steps"),
        (("parts", 1, "first"), 19, "a part of 20 steps from step 19, expected one from 20"),
        (("entries", "reward", "dtype"), "int64", "60 of 60 steps with the entries"),
        (("entries", "observation", "shape"), [2**33, 2**33], f"has 5760 bytes, expected {360 * 8 * 2**66}"),
        (("entries", "../x"), {"dtype": "bool", "shape": []}, "entries"),
    ],
)
def test_impossible_manifests(tmp_path, path, to, message):
    record_history(tmp_path, source(), part=20)
    content = json.loads((tmp_path / "manifest.json").read_text())
    *parents, last = path
    reduce(getitem, parents, content)[last] = to
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"was changed after it was written|this release reads"):
        load_history(tmp_path)
    reseal(tmp_path / "manifest.json", lambda content: None)
    with pytest.raises(FileError, match=message):
        load_history(tmp_path)


def change(key, function):
    return lambda steps: steps.clone().set(key, function(steps[key].clone()))


def terminate(steps):
    steps = steps.clone()
    steps["terminated"][1, 0, 10], steps["done"][1, 0, 10] = True, False
    return steps


def one_more(value):
    value[1, 0, 10] += 1
    return value


@pytest.mark.parametrize(
    ("break_one", "message"),
    [
        (terminate, r"1 steps are terminated but not done \(task 1, stream 0, step 10 is the first\)"),
        (change("episode", one_more), "have another 'episode' than .*step 10"),
        (change("reward", lambda value: value / 0), "non-finite 'reward'"),
        (change("action_log_prob", lambda value: value - torch.inf), "non-finite 'action_log_prob'"),
        (change("action_log_prob", lambda value: value[..., None]), r"of shape \[1\], expected"),
        (change("observation", lambda value: value.half()), "float16"),
        (change("observation", lambda value: value[..., :0]), "sizes of at least 1"),
        (lambda steps: steps.clone().set("a-b", torch.ones(3, 2, 60)), "'a-b'"),
        (change("observation", lambda x: x * torch.tensor([1, torch.inf])), "non-finite 'observation'"),
    ],
)
def test_impossible_steps_are_refused_and_nothing_is_written(tmp_path, break_one, message):
    made = source("every_step")
    whole = made.history()
    steps = break_one(whole)
    with pytest.raises(ValueError, match=message):
        LearningHistory(steps, made.tasks)
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        writer.extend(whole[..., :5])
        with pytest.raises(ValueError, match=message + "|those before had"):
            writer.extend(steps[..., 5:])
        writer.extend(whole[..., 5:])
    assert (load_history(tmp_path).steps == whole).all()


def fail(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *map(str, arguments[1:2]))


def test_a_part_that_found_no_room_is_recorded_again(tmp_path, monkeypatch):
    """Of real numbers, and with an entry that is not known."""
    made = source()
    steps = made.history()
    steps["observation"] = torch.rand(3, 2, 60, 4, generator=torch.Generator().manual_seed(0))
    steps["action"], steps["weight"] = steps["observation"][..., :2].clone(), steps["observation"][..., 0].clone()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", lambda *arguments: fail(), raising=False)
            with pytest.raises(OSError, match="No space") as caught:
                writer.extend(steps)
        file = tmp_path / "rows" / "action.memmap"
        assert describe(caught.value).startswith(f"{file}: No space left on device; make room on that disk")
        writer.extend(steps[..., :20])
        with monkeypatch.context() as patch:
            patch.setattr(HistoryManifest, "write", fail)
            with pytest.raises(OSError, match="No space"):
                writer.extend(steps[..., 20:40])
        assert writer.recorded == 20 == load_history(tmp_path, unfinished=True).recorded
        writer.extend(steps[..., 20:])
    assert (load_history(tmp_path).steps == steps).all()


def test_parts_that_do_not_fit(tmp_path):
    """Log-probabilities may be left out, from the first step on."""
    made = source()
    steps = made.history()
    assert "action_log_prob" not in LearningHistory(steps.exclude("action_log_prob"), made.tasks).steps
    with pytest.raises(KeyError, match="episode_step"):
        LearningHistory(steps.exclude("episode_step"), made.tasks)
    with pytest.raises(ValueError, match=r"another batch size: \[3, 2, 60\]"):
        LearningHistory(steps, made.tasks[:1])
    with HistoryWriter(tmp_path, made.tasks, 2, 30) as writer:
        for part in (steps[:, :1], steps, steps[..., :0]):
            with pytest.raises(ValueError, match="A part has batch size"):
                writer.extend(part)
        with pytest.raises(ValueError, match="have another 'episode_step'"):
            writer.extend(steps[..., 1:20])  # not the first steps
        writer.extend(steps[..., :20])
        with pytest.raises(ValueError, match=r"\[3, 2, 10\] at most, got \[3, 2, 20\]"):
            writer.extend(steps[..., 20:40])
        with pytest.raises(ValueError, match="but those before had"):
            writer.extend(steps[..., 20:30].exclude("action_log_prob"))


def test_steps_are_on_the_disk_before_the_manifest_lists_them(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(history_writer, "flush", lambda path: calls.append(path.stem))
    monkeypatch.setattr(HistoryManifest, "write", lambda manifest, path: calls.append(len(manifest.parts)))
    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        for block in made.blocks(30):
            writer.extend(block)
    keys = sorted(made.history().keys())
    assert calls == ["rows", *keys, 1, *keys, 2]


def all_windows(history, length, skip=1, at_episode_start=False):
    """Every window as (task, stream, steps), in plain loops."""
    found, (episodes, numbers) = Counter(), (history.steps[key].tolist() for key in ("episode", "episode_step"))
    for task, stream, remainder in product(range(3), range(2), range(skip)):
        kept = [step for step, episode in enumerate(episodes[task][stream]) if episode % skip == remainder]
        for first in range(len(kept) - length + 1):
            if not at_episode_start or numbers[task][stream][kept[first]] == 0:
                found[(task, stream, *kept[first : first + length])] += 1
    return found


def located(history, index):
    """Windows of indices as (task, stream, steps); fails if one crosses a stream."""
    places = {number: place for place, number in np.ndenumerate(history.flat_index().numpy())}
    for window in index.tolist():
        steps = [places[number] for number in window]
        assert len({place[:2] for place in steps}) == 1, "crosses a stream"
        yield (*steps[0][:2], *(place[2] for place in steps))


@pytest.mark.parametrize(
    ("length", "skip", "at_episode_start"), [(1, 1, False), (4, 2, True), (13, 3, False), (13, 1, True)]
)
@pytest.mark.parametrize("unfinished", [False, True])
def test_an_epoch_is_every_window_of_recorded_steps_once(tmp_path, length, skip, at_episode_start, unfinished):
    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 100 if unfinished else 60) as writer:
        writer.extend(made.history())
    history = load_history(tmp_path, unfinished=unfinished)
    windows, found = HistoryWindows(history, length, skip_episodes=skip, at_episode_start=at_episode_start), Counter()
    for batch in windows.buffer(8):
        found.update(located(history, batch["index"]))
    assert found == all_windows(history, length, skip, at_episode_start)
    assert found.total() == len(windows)


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


@pytest.mark.parametrize("wrong", [{"length": 0}, {"length": 61}, {"length": 362}, {"tasks": [2, 3]}, {"tasks": []}])
def test_bad_options(history, wrong):
    """The history has streams of 60 steps, 360 in all."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HistoryWindows(history, **{"length": 5, **wrong})


def test_parts_of_a_split_are_disjoint_and_complete():
    numbers = torch.arange(100, 181)
    split = split_tasks(numbers, seed=4)
    assert [len(part) for part in split] == [61, 8, 12]
    assert torch.cat(split).sort().values.tolist() == numbers.tolist()
    assert all(part.tolist() == sorted(part.tolist()) for part in split)
    assert split_tasks(numbers, seed=4).test.tolist() == split.test.tolist()
    assert split_tasks(numbers, seed=5).test.tolist() != split.test.tolist()
    for wrong in ({"validation": 0.5, "test": 0.5}, {"test": -0.1}, {"tasks": [1] * 10}):
        with pytest.raises(ValueError, match="leave none of 10 different tasks"):
            split_tasks(**{"tasks": 10, **wrong})
