"""Learning histories on disk: what is recorded is read again, resumed after a kill, and checked."""

import json
import shutil

import pytest
import torch

from tests.algorithm_distillation.conftest import TASKS, source
from tests.kills import kills
from torchrl_lang._files import FileError, write_manifest
from torchrl_lang.algorithm_distillation import HistoryWriter, LearningHistory, load_history, record_history


def test_a_recorded_history_is_that_of_its_source(tmp_path, q_source):
    recorded = record_history(tmp_path / "history", q_source, part=13)
    assert (recorded.steps == q_source.history()).all()
    loaded = load_history(tmp_path / "history")
    assert (loaded.steps == q_source.history()).all()
    assert loaded.steps.shape == (3, 2, 60)
    assert loaded.tasks == [{"task": 2, "goal": [0, 2]}, {"task": 5, "goal": [1, 2]}, {"task": 7, "goal": [2, 1]}]
    assert loaded.task_numbers.tolist() == TASKS
    assert loaded.source == {
        "algorithm": "QLearning",
        "seed": 0,
        "learning_rate": 0.5,
        "gamma": 0.9,
        "decay": {"first": 1, "last": 0.5, "fraction": [0.3, 1.0]},
        "env": {
            "env": "DarkRoomEnv",
            "episode_length": 7,
            "n_tasks": 9,
            "n_states": 9,
            "n_actions": 5,
            "size": 3,
            "start": "random",
            "reward": "once",
        },
    }
    assert loaded.complete


@pytest.mark.slow
def test_a_recording_killed_at_any_step_is_resumed(tmp_path, q_source):
    folder, expected = tmp_path / "history", q_source.history()[..., :2].exclude("action_log_prob")
    q_source.steps = 2
    q_source.blocks = lambda part: expected.split(part, -1)  # which need not be played again for each kill
    found = set()
    for _ in kills(lambda: record_history(folder, q_source, part=1)):
        if (folder / "manifest.json").exists():
            partial = load_history(folder, unfinished=True)
            found.add(partial.recorded)
            assert (partial.steps == expected[..., : partial.recorded]).all()
        resumed = record_history(folder, q_source, part=1)
        assert resumed.complete
        assert (resumed.steps == expected).all()
        shutil.rmtree(folder)
    assert found == {1, 2}


def test_resuming_with_other_parts(tmp_path, q_source):
    folder, steps = tmp_path / "history", q_source.history()
    with HistoryWriter(folder, q_source.tasks, 2, 60, source=q_source.describe()) as writer:
        writer.extend(steps[..., :17])
    with pytest.raises(ValueError, match="has 17 of 60 planned steps: resume it, or use unfinished=True"):
        load_history(folder)
    partial = load_history(folder, unfinished=True)
    assert (partial.complete, partial.steps.shape) == (False, (3, 2, 17))
    assert (partial.flat[partial.flat_index()] == steps[..., :17]).all()
    assert (record_history(folder, q_source, part=10).steps == steps).all()
    parts = json.loads((folder / "manifest.json").read_text())["parts"]
    assert [part["steps"] for part in parts] == [17, 3, 10, 10, 10, 10]


def test_continuous_observations_and_further_entries(tmp_path):
    made = source()
    steps = made.history()
    steps["observation"] = torch.rand(3, 2, 60, 4, generator=torch.Generator().manual_seed(0))
    steps["action"] = steps["observation"][..., :2].clone()
    steps["weight"] = steps["observation"][..., 0].clone()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        for first in range(0, 60, 25):
            writer.extend(steps[..., first : first + 25])
    assert (load_history(tmp_path).steps == steps).all()


def test_another_source_is_refused(tmp_path, q_source):
    folder = tmp_path / "history"
    record_history(folder, q_source)
    with pytest.raises(ValueError, match=r"begun with other \['source'\]"):
        record_history(folder, source("every_step", algorithm=type(q_source)))
    with pytest.raises(FileExistsError, match="resume=True"):
        record_history(folder, q_source, resume=False)
    other = source("every_step", algorithm=type(q_source))
    other.describe = q_source.describe  # steps that differ although the description is the same
    with pytest.raises(ValueError, match="is that of another source"):
        record_history(folder, other)


def test_folders_of_others_and_of_running_writers_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something other"), HistoryWriter(tmp_path, [{"task": 0}], 1, 1):
        pass
    folder = tmp_path / "history"
    with (
        HistoryWriter(folder, [{"task": 0}], 1, 1),
        pytest.raises(FileExistsError, match="Another process writes in"),
        HistoryWriter(folder, [{"task": 0}], 1, 1),
    ):
        pass
    with HistoryWriter(folder, [{"task": 0}], 1, 1):  # the lock was released
        pass


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


def changed(content, *path, to):
    *parents, last = path
    inner = content
    for name in parents:
        inner = inner[name]
    inner[last] = to
    return content


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (("format",), "torchrl_lang rows", "format"),
        (("version",), 2, "version"),
        (("tasks", 0, "task"), 5, "number of its own"),
        (("tasks", 0), {}, "number of its own"),
        (("steps",), 59, "60 of 59 steps"),
        (("parts", 1, "first"), 19, "a part of 20 steps from step 19, expected one from 20"),
        (("parts", 1, "sha256"), {}, "a part"),
        (("entries", "reward", "dtype"), "int64", "60 of 60 steps with the entries"),
        (("entries", "observation", "dtype"), "float16", "dtype"),
        (("entries", "observation", "shape"), [2**33, 2**33], f"has 5760 bytes, expected {360 * 8 * 2**66}"),
        (("streams",), 2**62, "bytes, expected"),
        (("entries", "../x"), {"dtype": "bool", "shape": []}, "entries"),
    ],
)
def test_impossible_manifests(tmp_path, path, to, message):
    record_history(tmp_path, source(), part=20)
    content = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(changed(content, *path, to=to)))
    with pytest.raises(FileError, match=r"was changed after it was written|this release reads"):
        load_history(tmp_path)
    del content["digest"]
    write_manifest(tmp_path / "manifest.json", content)
    with pytest.raises(FileError, match=message):
        load_history(tmp_path)


def test_there_is_no_history(tmp_path):
    with pytest.raises(FileNotFoundError, match="no learning history"):
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
        (change("episode_step", one_more), "have another 'episode_step' than .*step 10"),
        (change("reward", lambda value: value / 0), "non-finite 'reward'"),
        (change("action", lambda value: value * torch.inf), "non-finite 'action'"),
        (change("action_log_prob", lambda value: value - torch.inf), "non-finite 'action_log_prob'"),
        (change("action_log_prob", lambda value: value[..., None]), r"of shape \[1\], expected"),
        (change("observation", lambda value: value.half()), "float16"),
        (change("observation", lambda value: value[..., :0]), "sizes of at least 1"),
        (lambda steps: steps.clone().set(("a", "b"), torch.ones(3, 2, 60)), "'a' of a step is TensorDict"),
        (lambda steps: steps.clone().set("a-b", torch.ones(3, 2, 60)), "'a-b'"),
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


def test_log_probabilities_may_be_left_out_and_other_entries_may_not():
    made = source()
    assert "action_log_prob" not in LearningHistory(made.history().exclude("action_log_prob"), made.tasks).steps
    with pytest.raises(KeyError, match="episode_step"):
        LearningHistory(made.history().exclude("episode_step"), made.tasks)
    with pytest.raises(ValueError, match=r"another batch size: \[3, 2, 60\]"):
        LearningHistory(made.history(), made.tasks[:1])
