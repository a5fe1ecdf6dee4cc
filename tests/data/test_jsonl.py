from __future__ import annotations

import json

import pytest

from torchrl_lang.data import Episode, Turn, dataset_from_jsonl, parse_dialogue, read_jsonl

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
        ("[]", "the line must be a JSON object"),
        ({}, "'turns' must be a list of at least one turn"),
        ({"turns": []}, "'turns' must be a list of at least one turn"),
        ({"turns": [USER, "hi"]}, "turn 2 must be a JSON object"),
        ({"turns": [{"role": ["user"], "text": ""}]}, "turn 1: 'role' must be one of .*, got .*user"),
        ({"turns": [AGENT], "truncated": "yes"}, "'truncated' must be true or false"),
        ({"turns": [USER, {"role": "system", "text": ""}]}, "turn 2: 'role' must be one of"),
        ({"turns": [{"role": "user"}]}, "turn 1: 'text' must be a string, got null"),
        ({"turns": [{**USER, "reward": 1}]}, "turn 1: only turns of the agent earn a reward"),
        ({"turns": [{**AGENT, "reward": True}]}, "turn 1: 'reward' must be a finite number, got true"),
        ({"turns": [{**AGENT, "reward": float("nan")}]}, "must be a finite number, got NaN"),
        ({"turns": [{**AGENT, "reward": 10**400}]}, "must be a finite"),
        ({"turns": [{**AGENT, "reward": 1e300}]}, "must be a finite float32"),
        ({"turns": [{**AGENT, "rewrad": 1}]}, r"turn 1: unknown keys \['rewrad'\]"),
        ({"turns": [USER], "reward": 1}, "the agent has none"),
        ({"turns": [AGENT], "terminated": 1}, "'terminated' must be true or false, got 1"),
        ({"turns": [AGENT], "id": 1}, r"unknown keys \['id'\]"),
        ('{"turns": [], "turns": []}', "a key is given twice"),
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
        ValueError, match=r"3 bad lines .*\n  line 2: .*\n  line 4: 'ï' .*\n  line 5: .*43 tokens.* 32\n"
    ):
        dataset_from_jsonl(path, tmp_path / "data", letters, 32)
    assert [file.name for file in tmp_path.iterdir()] == ["d.jsonl"]
    with pytest.warns(UserWarning, match="3 bad lines"):
        dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 32, on_error="skip")
    assert [dataset.episode(index) for index in range(len(dataset))] == EPISODES
    assert [line["line"] for line in dataset.manifest["notes"]["skipped"]] == [2, 4, 5]


def test_skipped_lines_are_returned(tmp_path):
    path = write(tmp_path / "d.jsonl", "nonsense", GOOD[0])
    with pytest.warns(UserWarning, match="1 bad lines"):
        episodes, bad = read_jsonl(path, on_error="skip")
    assert episodes == EPISODES[:1]
    assert [line.line for line in bad] == [1]


def test_reading_stops_where_all_is_bad(tmp_path):
    path = write(tmp_path / "d.jsonl", *["nonsense"] * 50)
    with pytest.raises(ValueError, match=r"10 bad lines .*reading stopped there"):
        read_jsonl(path)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD[0]).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"1 bad lines .*\n  line 2: 'utf-8' codec"):
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
    assert int(dataset[0]["action_mask"].sum()) == 5


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
    with pytest.raises(ValueError, match=r"1 bad lines .*\n  line 2: turn 1: 'role' must be one of"):
        read_jsonl(path)


def test_a_misspelt_option_is_refused_before_anything_is_read(tmp_path, letters):
    with pytest.raises(ValueError, match="'error' or 'truncate', got 'eror'"):
        dataset_from_jsonl(tmp_path / "nowhere.jsonl", tmp_path / "data", letters, 12, on_overflow="eror")
