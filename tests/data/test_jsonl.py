from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_lang._files import FileError
from torchrl_lang.data import dataset_from_jsonl, load_dataset, read_jsonl
from torchrl_lang.data.jsonl import parse_dialogue
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


def test_dialogues_are_read(tmp_path):
    path = write(tmp_path / "d.jsonl", GOOD[0], "", GOOD[1])
    assert read_jsonl(path) == (EPISODES, [])


def test_a_data_set_of_dialogues(tmp_path, letters):
    path = write(tmp_path / "d.jsonl", *GOOD)
    dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 32)
    assert [dataset.episode(index) for index in range(2)] == EPISODES
    assert dataset.manifest["source"] == "dialogues of d.jsonl"
    assert dataset.manifest["notes"] == {"skipped": [], "truncated_lines": []}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "a dialogue must be a JSON object"),
        ({}, "a dialogue must have one of the entries .'turns', 'messages'"),
        ({"turns": []}, "'turns' must be a list of at least one turn"),
        ({"turns": [USER, "hi"]}, "turn 2 must be a JSON object"),
        ({"turns": [{"role": ["user"], "text": ""}]}, "turn 1: 'role' must be one of .*, got .*user"),
        ({"turns": [AGENT], "truncated": "yes"}, "'truncated' must be true or false"),
        ({"turns": [USER, {"role": "system", "text": ""}]}, "turn 2: 'role' must be one of"),
        ({"turns": [{"role": "user"}]}, "turn 1: 'text' must be a string, got null"),
        ({"turns": [{**USER, "reward": 1}]}, "turn 1: only turns of the agent may have a reward"),
        ({"turns": [{**AGENT, "reward": True}]}, "turn 1: 'reward' must be a finite number, got true"),
        ({"turns": [{**AGENT, "reward": float("nan")}]}, "must be a finite number, got NaN"),
        ({"turns": [{**AGENT, "reward": 10**400}]}, "must be a finite"),
        ({"turns": [{**AGENT, "reward": 1e300}]}, "must be a finite float32"),
        ({"turns": [{**AGENT, "rewrad": 1}]}, r"turn 1: unknown keys \['rewrad'\]"),
        ({"turns": [USER], "reward": 1}, "there is no turn of the agent"),
        ({"turns": [AGENT], "terminated": 1}, "'terminated' must be true or false, got 1"),
        ({"turns": [AGENT], "id": 1}, r"unknown keys \['id'\]"),
        ('{"turns": [], "turns": []}', "the key 'turns' is repeated"),
    ],
)
def test_a_bad_line_says_why(line, reason):
    with pytest.raises(ValueError, match=reason):
        parse_dialogue(line if isinstance(line, str) else json.dumps(line))


def test_keys_can_be_ignored_by_name(tmp_path):
    path = write(tmp_path / "d.jsonl", {**GOOD[0], "id": 17})
    assert read_jsonl(path, ignore=["id"])[0] == EPISODES[:1]


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


def test_skipped_lines_are_returned(tmp_path):
    path = write(tmp_path / "d.jsonl", "nonsense", GOOD[0])
    with pytest.warns(UserWarning, match="1 bad line of .* skipped .line 1: it is not JSON"):
        episodes, bad = read_jsonl(path, on_error="skip")
    assert episodes == EPISODES[:1]
    assert [line.line for line in bad] == [1]


def test_reading_stops_where_all_is_bad(tmp_path):
    path = write(tmp_path / "d.jsonl", *["nonsense"] * 50)
    with pytest.raises(ValueError, match=r"holds at least 5 bad lines"):
        read_jsonl(path)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD[0]).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"1 bad line .line 2: it is not UTF-8 .byte 1 is 0xff."):
        read_jsonl(path)


def test_half_a_character_is_a_bad_line_even_in_the_report(tmp_path, letters):
    """JSON can spell half a surrogate pair, which no file can hold as it is."""
    half = json.dumps({"turns": [{"role": "assistant", "text": "\ud800", "reward": "\ud800"}]})
    path = write(tmp_path / "d.jsonl", half, half.replace(', "reward": "\\ud800"', ""), GOOD[0])
    with pytest.warns(UserWarning, match="2 bad lines"):
        dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 32, on_error="skip")
    assert [line["line"] for line in dataset.manifest["notes"]["skipped"]] == [1, 2]
    assert len(dataset) == 1


def test_long_dialogues_are_truncated_on_demand_and_noted(tmp_path, letters):
    path = write(tmp_path / "d.jsonl", GOOD[0], GOOD[1])
    with pytest.warns(UserWarning, match="1 dialogues .* the first is on line 2"):
        dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 12, on_overflow="truncate")
    assert dataset.manifest["notes"]["truncated_lines"] == [2]
    assert dataset[:]["truncated"].flatten().tolist() == [False, True]
    assert letters.decode(dataset[1]["tokens"][:11]) == "<a>is it red?"


def test_control_tokens_in_a_dialogue_are_text(tmp_path, letters):
    evil = {"turns": [{"role": "user", "text": "a</s>b</a>"}, {"role": "assistant", "text": "</a>", "reward": 1}]}
    dataset = dataset_from_jsonl(write(tmp_path / "d.jsonl", evil), tmp_path / "data", letters, 32)
    assert dataset.episode(0) == Episode([Turn("a</s>b</a>"), Turn("</a>", 1.0)], terminated=True)
    assert int(dataset[0]["agent_mask"].sum()) == 5


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (True, False)),
        ({"truncated": True}, (False, True)),
        ({"terminated": False}, (False, False)),
        ({"terminated": True, "truncated": True}, (True, True)),
    ],
)
def test_how_a_dialogue_ended(flags, expected):
    episode = parse_dialogue(json.dumps({"turns": [AGENT], **flags}))
    assert (episode.terminated, episode.truncated) == expected


def test_a_role_of_another_type_is_a_bad_line(tmp_path):
    path = write(tmp_path / "d.jsonl", GOOD[0], {"turns": [{"role": {}, "text": "hi"}]})
    with pytest.raises(ValueError, match=r"1 bad line .line 2: turn 1: 'role' must be one of"):
        read_jsonl(path)


def test_a_misspelt_option_is_refused_before_anything_is_read(tmp_path, letters):
    with pytest.raises(ValueError, match="on_overflow='eror' is unknown"):
        dataset_from_jsonl(tmp_path / "nowhere.jsonl", tmp_path / "data", letters, 12, on_overflow="eror")


DAMAGED = {
    "not UTF-8": b'{"turns": [{"role": "agent", "text": "na\xefve"}]}',
    "UTF-16": GOOD[0].__repr__().encode("utf-16"),
    "cut": json.dumps(GOOD[0]).encode()[:-4],
    "two on a line": json.dumps(GOOD[0]).encode() * 2,
    "a mark inside": "\ufeff".encode() + json.dumps(GOOD[0]).encode(),
    "NaN": b'{"turns": [{"role": "agent", "text": "a", "reward": NaN}]}',
    "minus infinity": b'{"turns": [{"role": "agent", "text": "a"}], "reward": -Infinity}',
    "sum beyond float32": b'{"turns": [{"role": "agent", "text": "a", "reward": 3e38}], "reward": 3e38}',
    "digits": b'{"turns": [{"role": "agent", "text": "a", "reward": ' + b"9" * 10_000 + b"}]}",
    "deep": b'{"turns": ' + b"[" * 100_000,
    "long text": b'{"turns": [{"role": "agent", "text": "' + b"%" * 10_000_000 + b'"}]}',
    "long role": b'{"turns": [{"role": "' + b"x" * 10_000_000 + b'", "text": ""}]}',
    "long key": b'{"turns": [], "' + b"x" * 10_000_000 + b'": 1}',
    "long turns": b'{"turns": "' + b"x" * 10_000_000 + b'"}',
    "key twice inside": b'{"turns": [{"role": "agent", "text": "a", "text": "b"}]}',
    "key twice, of many": json.dumps({str(n): 0 for n in range(100_000)})[:-1].encode() + b', "99999": 1}',
    "half a pair": b'{"turns": [{"role": "agent", "text": "a\\ud800"}]}',
    "a null text": b'{"turns": [{"role": "agent", "text": null}]}',
    "a number": b"17",
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


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_dialogue_is_an_error(tmp_path, letters, content):
    (tmp_path / "d.jsonl").write_bytes(content)
    for read in (read_jsonl, lambda path: dataset_from_jsonl(path, tmp_path / "data", letters, 32)):
        with pytest.raises(FileError, match="holds no dialogue: give a file with one JSON object per line"):
            read(tmp_path / "d.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["d.jsonl"]


def test_what_is_no_file_is_an_error(tmp_path):
    with pytest.raises(FileError, match="nowhere is missing: give the path"):
        read_jsonl(tmp_path / "nowhere")
    with pytest.raises(FileError, match="is not a regular file: give the path"):
        read_jsonl(tmp_path)


TEXT = st.text("abc ?<>/|", max_size=6)
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "environment"]), "text": TEXT}) | st.fixed_dictionaries(
    {"role": st.sampled_from(["assistant", "agent"]), "text": TEXT}, optional={"reward": st.floats(-9, 9, width=32)}
)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.lists(TURN, min_size=1, max_size=4), min_size=1, max_size=12),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
    st.booleans(),
)
def test_what_is_accepted_comes_back(letters, dialogues, newline, marked):
    """With any line ends, a byte order mark or none, and no end of line at the end."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "d.jsonl"
        text = newline.join(json.dumps({"turns": turns}) for turns in dialogues)
        path.write_bytes(text.encode("utf-8-sig" if marked else "utf-8"))
        dataset = dataset_from_jsonl(path, f"{home}/data", letters, 40)
        for index, turns in enumerate(dialogues):
            said = [(turn["text"], turn.get("reward", 0.0)) for turn in turns if turn["role"] in ("agent", "assistant")]
            episode = dataset.episode(index)
            assert [turn.text for turn in episode.turns] == [turn["text"] for turn in turns]
            assert [(turn.text, turn.reward) for turn in episode.turns if turn.by_agent] == said
