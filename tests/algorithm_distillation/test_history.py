"""Learning histories on disk: what is recorded is read again, resumed after a kill, and checked."""

import json
import shutil
from collections import Counter

import pytest
import torch

from tests.algorithm_distillation.conftest import TASKS, source
from tests.kills import kills
from torchrl_lang._files import Fields, FileError, write_manifest
from torchrl_lang.algorithm_distillation import (
    HistoryWriter,
    LearningHistory,
    history_writer,
    load_history,
    record_history,
)
from torchrl_lang.data import load_dataset


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


def test_a_truncated_episode_is_not_terminated(tmp_path):
    steps = record_history(tmp_path / "history", source("once")).steps
    done, terminated = steps["done"], steps["terminated"]
    truncated = done & ~terminated
    assert truncated.any()
    assert terminated.any()
    assert (steps["episode_step"][truncated.squeeze(-1)] == 6).all()  # the limit of seven steps
    assert (steps["reward"][terminated] == 1).all()
    assert (steps["reward"][truncated] == 0).all()


def test_indices_of_the_flat_steps(history):
    index = history.flat_index()
    assert (history.flat[index] == history.steps).all()


def test_steps_are_on_the_disk_before_the_manifest_lists_them(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(history_writer, "flush", lambda path: calls.append(path.stem))
    monkeypatch.setattr(history_writer, "write_manifest", lambda path, content: calls.append(len(content["parts"])))
    made = source()
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        for block in made.blocks(30):
            writer.extend(block)
    assert calls == ["rows", *sorted(ENTRIES), 1, *sorted(ENTRIES), 2]


@pytest.mark.slow
def test_a_recording_killed_at_any_step_is_resumed(tmp_path, q_source):
    folder, expected = tmp_path / "history", q_source.history()
    found = set()
    for _ in kills(lambda: record_history(folder, q_source, part=30)):
        if (folder / "manifest.json").exists():
            partial = load_history(folder, unfinished=True)
            found.add(partial.recorded)
            assert (partial.steps == expected[..., : partial.recorded]).all()
        resumed = record_history(folder, q_source, part=30)
        assert resumed.complete
        assert (load_history(folder).steps == expected).all()
        shutil.rmtree(folder)
    assert found == {30, 60}


def test_resuming_with_other_parts(tmp_path, q_source):
    folder, steps = tmp_path / "history", q_source.history()
    with HistoryWriter(folder, q_source.tasks, 2, 60, source=q_source.describe()) as writer:
        writer.extend(steps[..., :17])
    with pytest.raises(ValueError, match="has 17 of 60 planned steps: resume its recording, or use unfinished=True"):
        load_history(folder)
    partial = load_history(folder, unfinished=True)
    assert (partial.complete, partial.steps.shape) == (False, (3, 2, 17))
    assert (partial.flat[partial.flat_index()] == steps[..., :17]).all()
    assert (record_history(folder, q_source, part=10).steps == steps).all()
    assert [part["steps"] for part in json.loads((folder / "manifest.json").read_text())["parts"]] == [
        17,
        3,
        10,
        10,
        10,
        10,
    ]


def test_another_source_is_refused(tmp_path, q_source):
    folder = tmp_path / "history"
    record_history(folder, q_source)
    with pytest.raises(ValueError, match="begun with other source"):
        record_history(folder, source())
    with pytest.raises(FileExistsError, match="holds a learning history: give another folder, or resume=True"):
        record_history(folder, q_source, resume=False)
    with pytest.raises(ValueError, match="begun with other source"):
        record_history(folder, source("every_step", algorithm=type(q_source)))
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


ENTRIES = ["observation", "action", "reward", "done", "terminated", "action_log_prob", "episode", "episode_step"]


@pytest.mark.parametrize("key", ENTRIES)
def test_a_changed_byte_is_found(tmp_path, key):
    record_history(tmp_path / "history", source(), part=20)
    path = tmp_path / "history" / "rows" / f"{key}.memmap"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FileError, match=rf"has other \['{key}'\] than it recorded in steps 40 to 60"):
        load_history(tmp_path / "history")
    load_history(tmp_path / "history", verify=False)
    with pytest.raises(FileError, match="has other"):
        record_history(tmp_path / "history", source())


def test_the_manifest_is_read_once(tmp_path, monkeypatch):
    record_history(tmp_path, source(), part=20)
    names, list_of = [], Fields.list_of

    def counted(fields, name, kind):
        names.append(name)
        return list_of(fields, name, kind)

    monkeypatch.setattr(Fields, "list_of", counted)
    load_history(tmp_path)
    assert Counter(names) == {"tasks": 1, "parts": 1, "shape": len(ENTRIES)}


def test_damaged_files_and_manifests(tmp_path):
    folder = tmp_path / "history"
    with pytest.raises(FileNotFoundError, match="no learning history"):
        load_history(folder)
    record_history(folder, source(), part=20)
    path, manifest = folder / "rows" / "done.memmap", folder / "manifest.json"
    whole, text = path.read_bytes(), manifest.read_text()
    path.write_bytes(whole[:-1])
    with pytest.raises(FileError, match="has 359 bytes, expected 360"):
        load_history(folder, verify=False)
    path.unlink()
    with pytest.raises(FileError, match="is missing"):
        load_history(folder)
    path.write_bytes(whole)
    manifest.write_text(text.replace('"streams": 2', '"streams": 1'))
    with pytest.raises(FileError, match="was changed after it was written"):
        load_history(folder)


def test_a_dataset_is_no_history_and_a_history_is_no_dataset(tmp_path):
    write_manifest(tmp_path / "manifest.json", {"format": "torchrl_lang rows", "version": 2})
    with pytest.raises(FileError, match=r"has 'torchrl_lang rows' as \"format\", expected 'torchrl_lang learning"):
        load_history(tmp_path)
    write_manifest(tmp_path / "manifest.json", {"format": "torchrl_lang learning history", "version": 9})
    with pytest.raises(
        FileError, match=r"has 'torchrl_lang learning history' as \"format\", expected 'torchrl_lang rows'"
    ):
        load_dataset(tmp_path)


def change(content, *path, to):
    *parents, last = path
    for name in parents:
        content = content[name]
    content[last] = to


@pytest.mark.parametrize(
    ("path", "to", "message"),
    [
        (("format",), "rows", "has 'rows' as \"format\""),
        (("version",), 2, "has version 2"),
        (("tasks", 0, "task"), 5, "has bad tasks: .*must differ"),
        (("tasks", 0), {}, 'has bad tasks: .*number as "task"'),
        (("steps",), 59, 'has parts of 60 steps, but 59 as "steps"'),
        (("parts", 1, "first"), 19, "has a part of 20 steps from step 19, expected one from 20"),
        (("parts", 1, "sha256"), {}, "has a part"),
        (("entries", "reward", "dtype"), "int64", "does not describe 'reward'"),
        (("entries", "observation", "dtype"), "float16", "has a bad entry"),
        (("entries", "observation", "shape"), [0], "does not describe 'observation'"),
        (("entries", "observation", "shape"), [2**33, 2**33], f"has 5760 bytes, expected {360 * 8 * 2**66}"),
        (("streams",), 2**62, f"has 2880 bytes, expected {3 * 2**62 * 60 * 8}"),
        (("entries", "../x"), {"dtype": "bool", "shape": []}, "has a bad entry"),
    ],
)
def test_impossible_manifests(tmp_path, path, to, message):
    record_history(tmp_path, source(), part=20)
    content = json.loads((tmp_path / "manifest.json").read_text())
    del content["digest"]
    change(content, *path, to=to)
    write_manifest(tmp_path / "manifest.json", content)
    with pytest.raises(FileError, match=message):
        load_history(tmp_path)


def impossible(steps, kind):
    """Steps with one mistake, at step 10 of task 1 and stream 0."""
    steps, place = steps.clone(), (1, 0, 10)
    if kind == "terminated":
        steps["terminated"][place], steps["done"][place] = True, False
    elif kind == "reward":
        steps["reward"][place] = float("nan")
    else:
        steps[kind][place] += 1
    return steps


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("terminated", "1 steps are terminated but not done"),
        ("reward", "have a non-finite .reward."),
        ("episode", "have another 'episode' than"),
        ("episode_step", "have another 'episode_step' than"),
    ],
)
def test_impossible_steps_are_refused(tmp_path, kind, message):
    made = source("every_step")
    steps = impossible(made.history(), kind)
    where = r".*\(task 1, stream 0, step 10 is the first\)"
    with pytest.raises(ValueError, match=message + where):
        LearningHistory(steps, made.tasks)
    with HistoryWriter(tmp_path, made.tasks, 2, 60) as writer:
        writer.extend(steps[..., :5])
        with pytest.raises(ValueError, match=message + where):
            writer.extend(steps[..., 5:])
        assert writer.recorded == 5
        writer.extend(made.history()[..., 5:])  # nothing was written before
    assert (load_history(tmp_path).steps == made.history()).all()


def test_steps_that_do_not_fit(tmp_path):
    made = source()
    steps = made.history()
    with pytest.raises(KeyError, match="episode_step"):
        LearningHistory(steps.exclude("episode_step"), made.tasks)
    with pytest.raises(ValueError, match=r"'reward' of a step is torch.float32 of shape \[\], expected"):
        LearningHistory(steps.clone().set("reward", steps["reward"].squeeze(-1)), made.tasks)
    with pytest.raises(ValueError, match=r"batch size \[1, streams, steps\], got \[3, 2, 60\]"):
        LearningHistory(steps, made.tasks[:1])
    with HistoryWriter(tmp_path, made.tasks, 2, 30) as writer:
        with pytest.raises(ValueError, match=r"batch size \[3, 2, L\], got \[3, 1, 60\]"):
            writer.extend(steps[:, :1])
        with pytest.raises(ValueError, match="0 of 30 planned steps were recorded, got 60 more"):
            writer.extend(steps)
        with pytest.raises(ValueError, match="have another 'episode_step'"):
            writer.extend(steps[..., 1:20])  # not the first steps
        writer.extend(steps[..., :20])
        with pytest.raises(ValueError, match="but those before had"):
            writer.extend(steps[..., 20:30].exclude("action_log_prob"))


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
