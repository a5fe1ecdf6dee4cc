from __future__ import annotations

import json

import pytest

from tests.data.chat_templates import FIRST_PROMPT_ONLY, chat_tokenizer
from torchrl_lang._files import FileError
from torchrl_lang.data import DialogueReader, dataset_from_jsonl, dataset_from_records, load_dataset, preference_pairs
from torchrl_lang.data.jsonl import read_jsonl
from torchrl_lang.text import Episode, Turn

GOOD = [
    {"turns": [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo", "reward": 1}]},
    {"turns": [{"role": "agent", "text": "is it red?"}, {"role": "environment", "text": "no"},
               {"role": "agent", "text": "ok", "reward": -0.5}, {"role": "environment", "text": "bye"}],
     "reward": 2, "terminated": False},
]  # fmt: skip
EPISODES = [
    Episode([Turn("hi"), Turn("yo", 1.0)], terminated=True),
    Episode([Turn("is it red?", 0.0), Turn("no"), Turn("ok", 1.5), Turn("bye")], terminated=False),
]
USER, AGENT = {"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo"}
ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


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
        ({"prompt": "a"}, "with one of the entries"),
        ({"turns": []}, 'has .* as "turns", expected .* at least 1 item'),
        ({"turns": [{"role": ["user"], "text": ""}]}, 'as "turns.0.role", expected'),
        ({"turns": [{"role": "user"}]}, 'has no field "turns.0.text"'),
        ({"turns": [{**USER, "reward": 1}]}, "has a reward, but only messages of the assistant may, not of 'user'"),
        ({"turns": [{**AGENT, "reward": float("nan")}]}, 'has nan as "turns.0.reward", expected a finite number'),
        ({"turns": [{**AGENT, "rewrad": 1}]}, 'has the unknown field "turns.0.rewrad"'),
        ({"turns": [AGENT], "reward": None}, "a reward must be a finite number, got None"),
        ({"turns": [USER], "reward": 1}, "there is no turn of the agent"),
        ({"turns": [AGENT], "terminated": 1}, 'has 1 as "terminated", expected'),
        ({"turns": [AGENT], "messages": [AGENT]}, 'has the unknown field "messages"'),
        ({"messages": [ASKED, SAID], "reward": [1, 2]}, "2 rewards for 1 turns of the agent"),
        ({"messages": [ASKED, SAID], "reward": True}, "a reward must be a finite number, got True"),
        ({"chosen": [ASKED, SAID]}, 'has no field "rejected"'),
        ({"messages": [ASKED, {**SAID, "role": "robot"}]}, """message 2 has 'robot' as "role", expected 'system'"""),
        ({"messages": [ASKED, {"role": "user"}]}, "message 2 has no text as 'content'"),
        ({"messages": [ASKED, {**ASKED, "content": [{"type": "image"}]}]}, 'as "content", expected a valid string'),
        ({"messages": [ASKED, {**ASKED, "reward": 1}]}, "has a reward, but only messages of the assistant may"),
        ({"messages": [ASKED, {**SAID, "weight": 1}]}, 'message 2 has the unknown field "weight"'),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"function": {"name": "f"}}]}]}, "use a ChatTokenizer"),
        ({"messages": [ASKED, "hi"]}, "message 2 is 'hi', expected a JSON object"),
    ],
)
def test_a_bad_line_says_why(line, reason):
    with pytest.raises(ValueError, match=reason):
        DialogueReader()(line)


def test_bad_lines_are_counted_until_there_are_too_many(tmp_path):
    with pytest.raises(ValueError, match=r"holds 3 bad lines \(lines 1, 3: it is not JSON .*; line 4: .*\): fix"):
        read_jsonl(write(tmp_path / "d.jsonl", "{", GOOD[0], "{", "[]"))
    with pytest.raises(ValueError, match=r"holds at least 5 bad lines"):
        read_jsonl(write(tmp_path / "d.jsonl", *["nonsense"] * 50))


def test_long_dialogues_are_truncated_on_demand_and_noted(tmp_path, letters):
    path = write(tmp_path / "d.jsonl", GOOD[0], GOOD[1])
    with pytest.warns(UserWarning, match=r"1 dialogues of .*d\.jsonl are longer .* the first is line 2"):
        dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 12, on_overflow="truncate")
    assert dataset.manifest["notes"]["truncated_lines"] == [2]
    assert dataset[:]["truncated"].flatten().tolist() == [False, True]
    assert letters.decode(dataset[1]["tokens"][:11]) == "<a>is it red?"
    with pytest.warns(UserWarning, match="1 dialogues of the records are longer .* the first is record 2"):
        dataset_from_records(GOOD, tmp_path / "other", letters, 12, on_overflow="truncate")


DAMAGED = {
    "text of others": b'{"turns": [{"role": "agent", "text": "na\\u00efve"}]}',
    "not UTF-8": b'{"turns": [{"role": "agent", "text": "na\xefve"}]}',
    "a mark inside": "\ufeff".encode() + json.dumps(GOOD[0]).encode(),
    "sum beyond float32": b'{"turns": [{"role": "agent", "text": "a", "reward": 3e38}], "reward": 3e38}',
    "digits": b'{"turns": [{"role": "agent", "text": "a", "reward": ' + b"9" * 10_000 + b"}]}",
    "long text": b'{"turns": [{"role": "agent", "text": "' + b"%" * 1_000_000 + b'"}]}',
    "too long a row": b'{"turns": [{"role": "agent", "text": "' + b"x" * 40 + b'"}]}',
    "key twice, of many": json.dumps({str(n): 0 for n in range(10_000)})[:-1].encode() + b', "9999": 1}',
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
    assert message.endswith("): fix them, or leave them out with on_error='skip' (--on-error skip).")
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


def test_preferences_of_a_template_that_drops_earlier_thoughts(tmp_path):
    """Each answer has a row of its own: only the first that differs has one to compare with."""
    chat = chat_tokenizer(FIRST_PROMPT_ONLY["qwen3"])
    user, agent = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    other = {**agent, "content": "b"}
    told = {"prompt": [user, agent, user], "chosen": [agent], "rejected": [other]}
    pairs = preference_pairs(dataset_from_records([told], tmp_path / "data", chat, 64))
    texts = [chat.decode(row["tokens"][row["agent_mask"]]) for row in pairs[0]]
    assert texts == ["a<|im_end|>", "b<|im_end|>"]
    longer = {**told, "chosen": [agent, user, agent]}
    with pytest.raises(ValueError, match="answers after the first that differs have none to compare with"):
        dataset_from_records([longer], tmp_path / "more", chat, 64)


def test_preferences_keep_which_episodes_belong_together(tmp_path, letters):
    """By the number of their line; the last line has one episode, other files have no groups."""
    told = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "bc", "rejected": "cb"}]
    path = tmp_path / "d.jsonl"
    path.write_text("\n\n".join(map(json.dumps, [*told, GOOD[0]])))
    dataset = dataset_from_jsonl(path, tmp_path / "data", letters, 32)
    assert load_dataset(dataset.folder, verify=True).rows["group"].tolist() == [1, 1, 3, 3, 5]
    pairs = preference_pairs(dataset)
    texts = [[dataset.tokenizer.decode(row["tokens"][row["agent_mask"]][:-1]) for row in pair] for pair in pairs]
    assert texts == [["b", "c"], ["bc", "cb"]]
    path.write_text(json.dumps(GOOD[0]))
    assert "group" not in dataset_from_jsonl(path, tmp_path / "plain", letters, 32).rows.keys()
