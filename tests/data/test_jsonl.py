from __future__ import annotations

import json

import pytest

from torchrl_lang._files import FileError
from torchrl_lang.data import DialogueReader, dataset_from_jsonl, load_dataset
from torchrl_lang.data.jsonl import read_jsonl
from torchrl_lang.text import Episode, Turn

GOOD = [
    {"turns": [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo", "reward": 1}]},
    {
        "turns": [
            {"role": "agent", "text": "is it red?"},
            {"role": "environment", "text": "no"},
            {"role": "agent", "text": "ok", "reward": -0.5},
            {"role": "environment", "text": "bye"},
        ],
        "reward": 2,
        "terminated": False,
    },
]
EPISODES = [
    Episode([Turn("hi"), Turn("yo", 1.0)], terminated=True),
    Episode([Turn("is it red?", 0.0), Turn("no"), Turn("ok", 1.5), Turn("bye")], terminated=False),
]
USER, AGENT = {"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo"}


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_data_set_of_dialogues(tmp_path, letters):
    path = write(tmp_path / "d.jsonl", GOOD[0], "", GOOD[1])
    assert read_jsonl(path) == (EPISODES, [])
    dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 32)
    assert [dataset.episode(index) for index in range(2)] == EPISODES
    assert dataset.manifest["source"] == "dialogues of d.jsonl"
    assert dataset.manifest["notes"] == {"skipped": [], "truncated_lines": []}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ([], "a dialogue must be an object with one of the entries .'turns', 'messages'"),
        ({}, "a dialogue must be an object"),
        ({"turns": []}, 'has .* as "turns", expected .* at least 1 item'),
        ({"turns": [{"role": ["user"], "text": ""}]}, 'as "turns.0.role", expected'),
        ({"turns": [{"role": "user"}]}, 'has no field "turns.0.text"'),
        ({"turns": [{**USER, "reward": 1}]}, "expected a turn of the agent if it has a reward, not of the role 'user'"),
        ({"turns": [{**AGENT, "reward": float("nan")}]}, 'has nan as "turns.0.reward", expected a finite number'),
        ({"turns": [{**AGENT, "rewrad": 1}]}, 'has the unknown field "turns.0.rewrad"'),
        ({"turns": [USER], "reward": 1}, "there is no turn of the agent"),
        ({"turns": [AGENT], "terminated": 1}, 'has 1 as "terminated", expected'),
        ({"turns": [AGENT], "messages": [AGENT]}, 'has the unknown field "messages"'),
    ],
)
def test_a_bad_line_says_why(line, reason):
    with pytest.raises(ValueError, match=reason):
        DialogueReader()(line)


def test_bad_lines_are_reported_by_number(tmp_path, letters):
    foreign = {"turns": [{"role": "assistant", "text": "naïve"}]}
    long = {"turns": [{"role": "assistant", "text": "x" * 40}]}
    path = write(tmp_path / "d.jsonl", GOOD[0], "{", "", foreign, long, GOOD[1])
    with pytest.raises(
        ValueError, match=r"holds 3 bad lines \(line 2: .*; line 4: 'ï' .*; line 5: .*43 tokens.* 32\): fix"
    ):
        dataset_from_jsonl(path, tmp_path / "data", letters, 32)
    assert [file.name for file in tmp_path.iterdir()] == ["d.jsonl"]
    with pytest.warns(UserWarning, match="3 bad lines"):
        dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 32, on_error="skip")
    assert [dataset.episode(index) for index in range(len(dataset))] == EPISODES
    assert [line["line"] for line in dataset.manifest["notes"]["skipped"]] == [2, 4, 5]


def test_reading_stops_where_all_is_bad(tmp_path):
    path = write(tmp_path / "d.jsonl", *["nonsense"] * 50)
    with pytest.raises(ValueError, match=r"holds at least 5 bad lines"):
        read_jsonl(path)


def test_long_dialogues_are_truncated_on_demand_and_noted(tmp_path, letters):
    path = write(tmp_path / "d.jsonl", GOOD[0], GOOD[1])
    with pytest.warns(UserWarning, match="1 dialogues .* the first is line 2"):
        dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 12, on_overflow="truncate")
    assert dataset.manifest["notes"]["truncated_lines"] == [2]
    assert dataset[:]["truncated"].flatten().tolist() == [False, True]
    assert letters.decode(dataset[1]["tokens"][:11]) == "<a>is it red?"


def test_a_misspelt_option_is_refused_before_anything_is_read(tmp_path, letters):
    with pytest.raises(ValueError, match="on_overflow must be one of"):
        dataset_from_jsonl(tmp_path / "nowhere.jsonl", tmp_path / "data", letters, 12, on_overflow="eror")


DAMAGED = {
    "not UTF-8": b'{"turns": [{"role": "agent", "text": "na\xefve"}]}',
    "two on a line": json.dumps(GOOD[0]).encode() * 2,
    "a mark inside": "\ufeff".encode() + json.dumps(GOOD[0]).encode(),
    "NaN": b'{"turns": [{"role": "agent", "text": "a", "reward": NaN}]}',
    "sum beyond float32": b'{"turns": [{"role": "agent", "text": "a", "reward": 3e38}], "reward": 3e38}',
    "digits": b'{"turns": [{"role": "agent", "text": "a", "reward": ' + b"9" * 10_000 + b"}]}",
    "deep": b'{"turns": ' + b"[" * 100_000,
    "long text": b'{"turns": [{"role": "agent", "text": "' + b"%" * 1_000_000 + b'"}]}',
    "key twice, of many": json.dumps({str(n): 0 for n in range(10_000)})[:-1].encode() + b', "9999": 1}',
    "half a pair": b'{"turns": [{"role": "agent", "text": "a\\ud800"}]}',
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_one_line_in_the_error(tmp_path, letters, line):
    """Naming file, line and remedy; nothing of any size is repeated, in the error or in the manifest."""
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(GOOD[0]).encode() + b"\r\n\n" + line + b"\n" + json.dumps(GOOD[1]).encode())
    with pytest.raises(FileError) as caught:
        dataset_from_jsonl(path, tmp_path / "data", letters, 32)
    message = str(caught.value)
    assert message.startswith(f"{path} holds 1 bad line (line 3: ")
    assert message.endswith("): fix them, or leave them out with on_error='skip'.")
    assert "\n" not in message
    assert len(message) < 600
    assert [file.name for file in tmp_path.iterdir()] == ["d.jsonl"]
    with pytest.warns(UserWarning, match="1 bad line of"):
        dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 32, on_error="skip")
    assert [dataset.episode(index) for index in range(len(dataset))] == EPISODES
    assert [line["line"] for line in dataset.manifest["notes"]["skipped"]] == [3]
    assert (dataset.folder / "manifest.json").stat().st_size < 4000
    assert len(load_dataset(dataset.folder, verify=True)) == 2


@pytest.mark.parametrize("content", [b"\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_dialogue_is_an_error(tmp_path, letters, content):
    (tmp_path / "d.jsonl").write_bytes(content)
    for read in (read_jsonl, lambda path: dataset_from_jsonl(path, tmp_path / "data", letters, 32)):
        with pytest.raises(FileError, match="holds no dialogue: give one JSON object per line"):
            read(tmp_path / "d.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["d.jsonl"]
