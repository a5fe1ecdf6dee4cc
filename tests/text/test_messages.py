"""Conversations of messages to episodes and rows, and back."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random

import pytest

from tests.data.chat_templates import (
    EXACT,
    MARKERS,
    PIECES,
    QWEN3_CALLS,
    TOOL_CHATML,
    Family,
    chat_tokenizer,
    tokenizer_of,
)
from tests.rows import to_row
from torchrl_lang.data import DialogueReader, dataset_from_jsonl, dataset_from_records
from torchrl_lang.text import CharTokenizer, Episode, Turn, from_row, to_messages
from torchrl_lang.text.messages import from_messages, read_utterance

CALLS = ["\n</tool_call>", '{"name": "look", "arguments": {}}', '{"name": 1}']
CHATML = Family(TOOL_CHATML, EXACT["chatml"].special, "<|im_end|>", EXACT["chatml"].plain, pad="<|endoftext|>")


@pytest.fixture(scope="module")
def chatml():
    return chat_tokenizer(CHATML)


def conversation(draw):
    """A random conversation with a system prompt, calls of tools and their answers, and rewards."""

    def text():
        return "".join(draw.choices([*PIECES, *PIECES, *MARKERS, *CALLS], k=draw.randint(0, 6)))

    def call():
        arguments = draw.choice([{}, {"place": text()}, {"n": [1, -2.5, None, True], "deep": {"a": text()}}, text()])
        return {"type": "function", "function": {"name": draw.choice(["look", "go_to"]), "arguments": arguments}}

    found = [{"role": "system", "content": text()}] if draw.random() < 0.3 else []
    found.append({"role": "user", "content": text()})
    for _ in range(draw.randint(1, 4)):
        action = {"role": "assistant", "content": text()}
        answers = [{"role": "user", "content": text()}]
        if draw.random() < 0.4:
            action["tool_calls"] = [call() for _ in range(draw.randint(1, 2))]
            answers = [{"role": "tool", "content": text()} for _ in action["tool_calls"]]
        if draw.random() < 0.3:
            action["reward"] = float(draw.randint(1, 5))
        found += [action, *answers]
    return found if draw.random() < 0.5 else found[:-1]


def test_conversations_survive_rows_and_back(chatml):
    """Unchanged up to what the template itself does not distinguish: both must give the same text.

    ``CONVERSATIONS=10000`` tries more of them.
    """
    count = int(os.environ.get("CONVERSATIONS", "60"))
    draw, changed, tools = random.Random(0), 0, 0
    source = tokenizer_of(CHATML)
    for _ in range(count):
        messages = conversation(draw)
        before = copy.deepcopy(messages)
        row = to_row(from_messages(messages, chatml, terminated=False), chatml, 4000)
        again = to_messages(from_row(row, chatml), chatml)
        assert messages == before
        if messages[-1] == {"role": "user", "content": ""}:  # a row that goes on has it in any case
            messages = messages[:-1]
        tools += any("tool_calls" in message for message in messages)
        changed += again != messages
        texts = [source.apply_chat_template(m, tokenize=False) for m in (messages, again)]
        rewards = [[one.get("reward") for one in m if one["role"] == "assistant"] for m in (messages, again)]
        assert texts[0] == texts[1], (messages, again)
        assert rewards[0] == rewards[1]
    assert tools > 0.4 * count
    assert changed < 0.05 * count


def test_a_call_of_a_tool_in_full(chatml):
    look = {"name": "look", "arguments": {"at": "door"}}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"type": "function", "function": look}]},
        {"role": "tool", "content": "closed", "name": "look", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is closed.", "reward": 1.0},
    ]
    episode = from_messages(messages, chatml)
    call = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "door"}}\n</tool_call>'
    assert episode == Episode(
        [Turn("where?"), Turn(call, 0.0), Turn("closed", role="tool"), Turn("It is closed.", 1.0)], terminated=True
    )
    assert to_messages(episode, chatml) == [*messages[:2], {"role": "tool", "content": "closed"}, messages[3]]
    row = to_row(episode, chatml, 400)
    assert row["token_reward"].sum() == 1
    agent = chatml.decode(row["tokens"][row["agent_mask"]])
    assert agent == f"{call}<|im_end|>It is closed.<|im_end|>"


USER, AGENT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
TAGGED = (
    "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments | items %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n"
)
THOUGHT = "<think>\nso\n</think>\n\n"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "a"}, "a"),
        ({"content": "a", "reasoning_content": "so"}, THOUGHT + "a"),
        ({"content": "", "tool_calls": True}, CALL),
        ({"content": "", "tool_calls": True, "reasoning_content": "so"}, THOUGHT + CALL),
        ({"content": THOUGHT + "a", "tool_calls": True}, f"{THOUGHT}a\n{CALL}"),
    ],
)
def test_thoughts_and_calls_of_a_template_that_writes_empty_thoughts(message, text):
    chat = chat_tokenizer(dataclasses.replace(CHATML, template=QWEN3_CALLS))
    calls = [{"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}]
    message = {"role": "assistant", **message} | ({"tool_calls": calls} if "tool_calls" in message else {})
    assert from_messages([USER, message], chat).turns[-1].text == text
    read = read_utterance(text, chat)
    assert read.get("tool_calls", []) == (calls if "tool_calls" in message else [])
    assert from_messages([USER, read], chat).turns[-1].text == text


def test_calls_in_another_spelling(chatml):
    for call in ('{"arguments": {"at":1},"name":"look"}', '{ "name": "look", "arguments": {"at": 1} }'):
        text = f"so\n<tool_call>\n{call}\n</tool_call>"
        read = read_utterance(text, chatml)
        assert read["content"] == "so"
        assert read["tool_calls"] == [{"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}]
        assert read_utterance(text, chatml, exact=True)["content"] == text
    text = 'so: {"arguments": {"at":1},"name":"look"}'
    assert read_utterance(text, chatml) == {"role": "assistant", "content": text}


def test_calls_in_tags():
    """As Qwen3.5 writes them; whether 1 is a number or a text only the tool says."""
    call = TOOL_CHATML.replace("{{ (call.function or call) | tojson }}\n", TAGGED)
    chat = chat_tokenizer(dataclasses.replace(CHATML, template=call))
    tool = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
    told = dataclasses.replace(chat.row_format, tools=[{"type": "function", "function": tool}])
    text = "so\n<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n</function>\n</tool_call>"
    for row_format, value in ((chat.row_format, 1), (told, "1")):
        chat.row_format = row_format
        look = {"name": "look", "arguments": {"at": value}}
        read = {"role": "assistant", "content": "so", "tool_calls": [{"type": "function", "function": look}]}
        assert read_utterance(text, chat) == read
        assert from_messages([USER, read], chat).turns[-1].text == text


@pytest.mark.parametrize("entry", [{"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"thinking": "so"}])
def test_what_a_template_does_not_write_is_an_error(entry):
    chat = chat_tokenizer(EXACT["zephyr"])
    with pytest.raises(ValueError, match=f"message 2: the chat template does not write '{next(iter(entry))}'"):
        from_messages([USER, {**AGENT, **entry}], chat)
    assert from_messages([USER, {**AGENT, "tool_calls": []}], chat).turns[-1].text == "b"


def test_text_like_a_call_of_a_template_that_refuses_calls():
    refusal = "{% if messages[-1].tool_calls %}{{ raise_exception('no tools') }}{% endif %}"
    chat = chat_tokenizer(dataclasses.replace(CHATML, template=refusal + EXACT["chatml"].template))
    text = 'so: {"name": "look", "arguments": {}}'
    episode = Episode([Turn("where?"), Turn(text, 1.0)], terminated=True)
    assert to_messages(episode, chat)[1] == {"role": "assistant", "content": text, "reward": 1.0}


def test_what_a_template_writes_but_rows_do_not_keep_is_an_error():
    template = CHATML.template.replace("{{ m.role }}\n", "{{ m.name or m.role }}\n")
    tokenizer = chat_tokenizer(Family(template, CHATML.special, CHATML.end, pad=CHATML.pad))
    with pytest.raises(ValueError, match=r"writes \['name'\] of the messages, which rows do not keep"):
        from_messages([{**USER, "name": "Ann"}, AGENT], tokenizer)


def test_the_forms_of_a_dialogue(chatml):
    expected = Episode([Turn("a"), Turn("b", 2.0)], terminated=True)
    chats = {"prompt": [USER], "completion": [AGENT]}
    for record in (
        {"messages": [USER, AGENT], "reward": 2},
        {"messages": [USER, {**AGENT, "reward": 2}]},
        {"prompt": "a", "completion": "b", "reward": 2},
        {**chats, "reward": [2], "messages": None},  # a gap of a table
        {"turns": [{"role": "user", "text": "a"}, {"role": "agent", "text": "b"}], "reward": 2},
    ):
        assert DialogueReader()(record) == [expected]
    answers = {"chosen": [USER, AGENT], "rejected": [USER, {**AGENT, "content": "c"}]}
    assert DialogueReader()({"prompt": "a", **answers}) == DialogueReader()(answers)
    assert DialogueReader(reward="score", ignore=["id"])({**chats, "score": 2.0, "id": 7}) == [expected]
    with pytest.raises(ValueError, match="no entry 'score' for its reward"):
        DialogueReader(reward="score")(chats)
    turns = {"turns": [{"role": "user", "text": "a"}, {"role": "agent", "text": "b"}]}
    for record in (chats, turns):
        assert DialogueReader(reward=lambda messages: len(messages))(record) == [expected]
    assert DialogueReader(reward=lambda messages: [2.0])({"messages": [USER, AGENT]}) == [expected]
    assert DialogueReader()({**chats, "truncated": True})[0].terminated is False


def test_a_data_set_of_chats_from_a_file_and_from_records(tmp_path, chatml):
    draw = random.Random(3)
    records = [{"messages": conversation(draw), "id": index} for index in range(20)]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    reader = DialogueReader(ignore=["id"])
    one = dataset_from_jsonl(path, tmp_path / "one", chatml, 1000, reader=reader)
    two = dataset_from_records(iter(records), tmp_path / "two", chatml, 1000, reader=reader, source="chats")
    assert (one[:] == two[:]).all()
    assert two.manifest["source"] == "chats"
    assert one.episode(3) == from_row(to_row(from_messages(records[3]["messages"], chatml), chatml, 1000), chatml)


def test_bad_records_are_counted_and_named(tmp_path):
    letters = CharTokenizer.from_alphabet("ab")
    records = [{"messages": [USER, AGENT]}, 3, {"messages": [USER, {**AGENT, "content": "x"}]}]
    with pytest.raises(ValueError, match=r"The iterable holds 2 bad records \(record 2: .*; record 3: .*\): fix them"):
        dataset_from_records(records, tmp_path / "data", letters, 20)
    with pytest.warns(UserWarning, match="2 bad records of the records skipped") as caught:
        dataset = dataset_from_records(records, tmp_path / "data", letters, 20, on_error="skip")
    assert caught[0].filename == __file__
    assert (len(dataset), [bad["line"] for bad in dataset.manifest["notes"]["skipped"]]) == (1, [2, 3])
    with pytest.raises(ValueError, match="holds no dialogue: give one JSON object per line, or at least one record"):
        dataset_from_records([], tmp_path / "none", letters, 20)
    with pytest.warns(UserWarning, match="the first is record 1"):
        dataset_from_records(records[:1], tmp_path / "cut", letters, 4, on_overflow="truncate")


def test_hugging_face_data_sets_in_memory_and_streamed(tmp_path, chatml):
    datasets = pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")
    records = [
        {"messages": [USER, {**AGENT, "reward": 2.0}], "score": 1.0},  # gaps of a table are None
        {"messages": [{"role": "system", "content": "s"}, USER, AGENT, USER, AGENT], "score": 3.0},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    options = {"path": "json", "data_files": str(path), "split": "train", "cache_dir": str(tmp_path / "cache")}
    reader, expected = DialogueReader(reward="score"), None
    for number, found in enumerate(
        [records, datasets.Dataset.from_list(records), datasets.load_dataset(**options)]
        + [datasets.load_dataset(**options, streaming=True)]
    ):
        rows = dataset_from_records(found, tmp_path / str(number), chatml, 200, reader=reader)[:]
        expected = rows if expected is None else expected
        assert (rows == expected).all(), number
    assert expected["token_reward"].sum(-1).tolist() == [3.0, 3.0]
