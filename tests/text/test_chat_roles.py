"""Messages of the system and of tools, and several messages in a row, in rows of a chat."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.data.chat_templates import EXACT, FIRST_PROMPT_ONLY, TOOL_CHATML, Family, tokenizer_of
from torchrl_lang.text import CharTokenizer, ChatTokenizer, Episode, RowFormat, Turn, from_row, to_row

PIECES = [*"abc Z9 .!?\n", "\n\n", "the cat", " red", "日本", "😀", "العربية", '{"a": [1]}', "user\n", "</"]
MARKERS = ["<|im_end|>", "<|im_end|>\n<|im_start|>user\n", "<tool_response>\n", "\n</tool_response>", "<think>", "</s>"]
TOOLS = {"tools": EXACT["chatml"], "responses": Family(TOOL_CHATML, EXACT["chatml"].special, "<|im_end|>")}


def dialogue(draw, *, pieces, roles=("user", "tool"), system=True):
    """Random turns: several messages between utterances, the environment last."""
    turns = [Turn(text(draw, pieces), role="system")] if system and draw.random() < 0.5 else []
    turns.append(Turn(text(draw, pieces)))
    for _ in range(draw.randint(1, 4)):
        turns.append(Turn(text(draw, pieces), float(draw.randint(0, 3))))
        turns += [Turn(text(draw, pieces), role=draw.choice(roles)) for _ in range(draw.randint(1, 3))]
    return turns


def text(draw, pieces):
    return "".join(draw.choices(pieces, k=draw.randint(0, 6)))


def messages(turns):
    return [{"role": "assistant" if turn.by_agent else turn.role, "content": turn.text} for turn in turns]


def real_ids(row):
    return row["tokens"][row["attention_mask"]].tolist()


@pytest.mark.parametrize("name", TOOLS)
def test_dialogues_with_tools_equal_the_template(name):
    """Where the template writes one message of the user around several answers of tools, too."""
    source = tokenizer_of(TOOLS[name])
    tokenizer, draw = ChatTokenizer(source, RowFormat.from_chat_template(source)), random.Random(0)
    for _ in range(200):
        turns = dialogue(draw, pieces=PIECES, roles=("tool", "tool", "user"))
        expected = source.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
        row = to_row(Episode(turns, terminated=False), tokenizer, 1500)
        assert tokenizer.decode(real_ids(row)) == expected
        first = next((i for i, turn in enumerate(turns) if turn.by_agent), len(turns))
        opening = source.apply_chat_template(messages(turns[:first]), add_generation_prompt=True, return_dict=False)
        assert real_ids(row)[: len(opening)] == opening


@pytest.mark.parametrize("name", [*EXACT, "responses"])
def test_turns_with_roles_survive_rows_and_back(name):
    source = tokenizer_of({**EXACT, **TOOLS}[name])
    row_format = RowFormat.from_chat_template(source)
    tokenizer, draw = ChatTokenizer(source, row_format), random.Random(1)
    roles = [role for role in ("user", "tool") if f"assistant>{role}" in row_format.joins] or ["user"]
    for case in range(100):
        turns = dialogue(draw, pieces=[*PIECES, *MARKERS], roles=roles, system="start>system" in row_format.joins)
        clean = [row_format.clean_action if turn.by_agent else row_format.clean_text for turn in turns]
        turns = [Turn(c(t.text), t.reward, role=t.role) for c, t in zip(clean, turns, strict=True)]
        pairs = [f"{a.role}>{b.role}" for a, b in pairwise(turns) if not (a.by_agent or b.by_agent)]
        if not row_format.all_joins.keys() >= {*pairs}:
            continue
        row = to_row(Episode(turns, terminated=case % 2 == 0), tokenizer, 1500)
        again = from_row(row, tokenizer)
        assert (to_row(again, tokenizer, 1500) == row).all()
        if turns[-1].text:  # otherwise nothing is written after the last utterance of a task that has ended
            assert tokenizer.decode(real_ids(row)) == row_format.render(messages(turns), answer=case % 2 == 1)


def test_what_each_family_can_write():
    found = {name: sorted(RowFormat.from_chat_template(tokenizer_of(EXACT[name])).joins) for name in EXACT}
    tools = ["assistant>tool", "tool>assistant", "tool>end", "tool>tool", "tool>user", "user>tool"]
    system = ["start>system", "system>assistant", "system>end", "system>user"]
    every = sorted([*tools, *system, "user>user"])
    assert found["chatml"] == found["llama3"] == found["zephyr"] == found["phi3"] == every
    assert found["gemma"] == ["tool>assistant", "tool>end", "user>tool"]  # every second message must be the user's
    assert found["mistral"] == ["start>system", "system>user", "user>user"]


def test_a_fixed_system_prompt_leaves_no_place_for_another():
    source = tokenizer_of(EXACT["chatml"])
    row_format = RowFormat.from_chat_template(source, system="Be brief.")
    assert "assistant>tool" in row_format.joins
    episode = Episode([Turn("Be long.", role="system"), Turn("hi"), Turn("yo", 1.0)], terminated=True)
    with pytest.raises(ValueError, match=r"cannot have a system message at the beginning.*has a system prompt"):
        to_row(episode, ChatTokenizer(source, row_format), 100)


def test_tools_where_only_the_first_prompt_equals_the_template():
    """What follows the last utterance does, whatever happened to earlier thoughts."""
    family = FIRST_PROMPT_ONLY["qwen3"]
    source = tokenizer_of(family)
    row_format = RowFormat.from_chat_template(source, history="kept")
    turns = [Turn("hi"), Turn("<think>so</think>yo", 1.0), Turn("42", role="tool"), Turn("and?")]
    text = row_format.render(messages(turns))
    expected = source.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
    assert text == expected.replace("\nyo", "\n<think>so</think>yo")


def test_control_tokens_have_no_roles():
    with pytest.raises(ValueError, match="no messages of the roles tool: use a ChatTokenizer"):
        to_row(Episode([Turn("a", role="tool")], True), CharTokenizer.from_alphabet("a"), 10)


def test_roles_of_turns():
    with pytest.raises(ValueError, match="role"):
        Turn("a", role="robot")
    with pytest.raises(ValueError, match="role"):
        Turn("a", 1.0, role="tool")
