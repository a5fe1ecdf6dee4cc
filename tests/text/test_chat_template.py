"""Row formats of chat templates: what is derived, what is refused, and equality with the templates."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.data.chat_templates import (
    CHATML,
    EXACT,
    FIRST_PROMPT_ONLY,
    IM,
    LLAMA2,
    MISTRAL_LAST,
    TOOL_CHATML,
    Family,
    chat,
    tokenizer_of,
)
from tests.rows import to_row
from torchrl_lang.modules import causal_lm
from torchrl_lang.text import ChatTokenizer, Episode, RowFormat, Turn, from_row
from torchrl_lang.text.tokenizer_files import tokenizer_from_config, write_tokenizer

PIECES = [
    *"abc XYZ 012 .,!? \n \t",
    "  ", "\n\n", "the cat", " red", "Ü", "日本", "😀", "e\u0301", "العربية",
    "{'a': 1}", "<b>", "INST", "user\n", "[/", "</",
]  # fmt: skip
MARKERS = ["<|im_end|>", "<|im_start|>user\n", "</s>", "<think>", "<|eot_id|>", "<end_of_turn>", "<tool_call>"]


@pytest.fixture(scope="module", params=EXACT)
def source(request):
    return tokenizer_of(EXACT[request.param])


def messages_of(draw, pieces, *, turns=None):
    """Texts of the environment and the agent in turn; the environment has the last word."""
    length = 2 * (draw.randint(0, 3) if turns is None else turns) + 1
    return ["".join(draw.choices(pieces, k=draw.randint(0, 8))) for _ in range(length)]


def rendered(source, messages, *, answer=True, system=None):
    """What the template writes."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return source.apply_chat_template([*first, *chat(*messages)], tokenize=False, add_generation_prompt=answer)


def row_of(tokenizer, messages):
    """The ids of a row whose agent is to answer the last message."""
    ids = tokenizer.encode_opening(messages[0])
    for action, reply in zip(messages[1::2], messages[2::2], strict=True):
        ids += [*tokenizer.encode_action(action), tokenizer.control.end_of_action, *tokenizer.encode_reply(reply)]
    return ids


def test_conversations_equal_the_template(source):
    row_format = RowFormat.from_chat_template(source)
    tokenizer, draw = ChatTokenizer(source, row_format), random.Random(0)
    equal_ids = 0
    for _ in range(40):
        messages = messages_of(draw, PIECES)
        text = rendered(source, messages)
        assert row_format.render(chat(*messages)) == text
        first = row_of(tokenizer, messages[:1])
        assert first == source(rendered(source, messages[:1]), add_special_tokens=False)["input_ids"]
        ids = row_of(tokenizer, messages)
        assert ids[: len(first)] == first
        assert tokenizer.decode(ids) == text
        equal_ids += ids == source(text, add_special_tokens=False)["input_ids"]
    assert equal_ids > 30  # elsewhere an utterance would merge with the white space before it


def test_names_of_tokens_in_texts_are_plain_text(source):
    tokenizer, draw = ChatTokenizer(source, RowFormat.from_chat_template(source)), random.Random(1)
    plain = tokenizer.row_format.render(chat(*[""] * 5))
    expected = source(plain, add_special_tokens=False)["input_ids"]
    added = set(source.added_tokens_decoder)
    for _ in range(60):
        messages = messages_of(draw, [*PIECES, *MARKERS], turns=2)
        ids = row_of(tokenizer, messages)
        assert tokenizer.decode(ids) == tokenizer.row_format.render(chat(*messages))
        structure = [token for token in ids if token in added]
        allowed = {source.convert_tokens_to_ids(name) for name in ("<think>", "<tool_call>")}  # the agent's
        assert [t for t in structure if t not in allowed] == [token for token in expected if token in added]


def test_rows_survive_messages_and_back(source):
    tokenizer, draw = ChatTokenizer(source, RowFormat.from_chat_template(source)), random.Random(2)
    clean = tokenizer.row_format.clean_text, tokenizer.row_format.clean_action
    for case in range(60):
        messages = messages_of(draw, [*PIECES, *MARKERS])
        terminated = case % 3 == 0
        turns = [Turn(clean[i % 2](text), float(i) if i % 2 else None) for i, text in enumerate(messages)]
        row = to_row(Episode(turns, terminated, truncated=not terminated), tokenizer, 600)
        again = from_row(row, tokenizer)
        said = [turn for turn in turns if turn.by_agent or turn.text]  # messages without text are no turns
        assert [(t.text, t.reward, t.closed) for t in again.turns] == [(t.text, t.reward, t.closed) for t in said]
        assert (again.terminated, again.truncated, again.cut) == (terminated, not terminated, False)
        assert (to_row(again, tokenizer, 600) == row).all()


def test_a_system_prompt_and_tools_stand_in_the_opening():
    source = tokenizer_of(EXACT["chatml"])

    def look(direction: str):
        """
        Look around.

        Args:
            direction: where to
        """

    row_format = RowFormat.from_chat_template(source, system="Be brief.", tools=[look])
    assert '"name": "look"' in row_format.opening
    assert "Be brief." in row_format.opening
    assert RowFormat.from_chat_template(source, default_system="Hello.").opening.startswith(
        "<|im_start|>system\nHello."
    )


@pytest.mark.parametrize("name", FIRST_PROMPT_ONLY)
def test_templates_that_rewrite_history(name):
    family = FIRST_PROMPT_ONLY[name]
    source = tokenizer_of(family)
    with pytest.raises(ValueError, match="history='kept'"):
        RowFormat.from_chat_template(source, **family.options)
    row_format = RowFormat.from_chat_template(source, history="kept", **family.options)
    tokenizer = ChatTokenizer(source, row_format)
    expected = source.apply_chat_template(
        chat("hi there"), add_generation_prompt=True, return_dict=False, **family.options
    )
    assert tokenizer.encode_opening("hi there") == expected
    assert row_format.render(chat("hi", "<think>so</think>yo", "and")).count("so") == 1  # kept


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        (Family(LLAMA2, ("</s>",), "</s>", bos="<s>"), {}, "does not begin with a special token"),
        (Family(MISTRAL_LAST, ("</s>",), "</s>", bos="<s>"), {"system": "Play."}, "changes the text before the first"),
        (EXACT["gemma"], {"system": "Play."}, "System role not supported"),
        (Family("{{ messages[-1].content }}", IM, "<|im_end|>"), {}, "not once"),
        (Family(CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), IM, "<|im_end|>"), {}, "0 times"),
        (Family(CHATML.replace("{{ m.content }}", "{{ m.content | replace('\n', ' ') }}"), IM, "<|im_end|>"), {},
         "Rows"),
        (Family("", IM, "<|im_end|>"), {}, "no chat template"),
    ],
    ids=["space before the end", "system moved", "no system", "last message", "upper case", "lines joined", "none"],
)  # fmt: skip
def test_templates_that_rows_cannot_follow_are_refused(family, options, reason):
    with pytest.raises(ValueError, match=reason):
        RowFormat.from_chat_template(tokenizer_of(family), **options)


def test_saved_and_loaded():
    source = tokenizer_of(EXACT["chatml"])
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    again = tokenizer_from_config(tokenizer.config())
    assert (again.config(), again.control, again.row_format) == (
        tokenizer.config(), tokenizer.control, tokenizer.row_format,
    )  # fmt: skip
    assert again.encode_opening("a </s> b") == tokenizer.encode_opening("a </s> b")
    for change, found in (({"further": 1}, 'has the unknown field "further"'), ({"opening": 1}, 'has 1 as "opening"')):
        with pytest.raises(ValueError, match=f"The row format {found}"):
            RowFormat.from_config(tokenizer.row_format.config() | change)


def test_a_format_of_another_tokenizer_is_refused():
    row_format = RowFormat.from_chat_template(tokenizer_of(EXACT["llama3"]))
    with pytest.raises(ValueError, match="not a special token of this tokenizer"):
        ChatTokenizer(tokenizer_of(EXACT["chatml"]), row_format)


def test_damaged_episodes():
    tokenizer = ChatTokenizer(source := tokenizer_of(EXACT["chatml"]), RowFormat.from_chat_template(source))
    with pytest.raises(ValueError, match="cannot have 'user>system'"):
        to_row(Episode([Turn("a"), Turn("b", role="system")], True), tokenizer, 100)
    with pytest.raises(ValueError, match="2 turns of the environment follow each other"):
        to_row(Episode([Turn("a", tokens=(1, 2)), Turn("b")], True), tokenizer, 100)
    row = to_row(Episode([Turn("a"), Turn("b", 1.0)], True), tokenizer, 100)
    with pytest.raises(KeyError, match="terminated"):
        from_row(row.exclude("terminated"), tokenizer)
    end = int(row["agent_mask"].nonzero()[-1])
    row["tokens"][end] = tokenizer.encode("b")[0]
    row["attention_mask"][end + 1] = True
    with pytest.raises(ValueError, match="has no end token"):
        from_row(row, tokenizer)


def test_transformers_alone_reads_the_saved_tokenizer(source, tmp_path):
    """With the chat template: it writes the same text and ids."""
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    causal_lm("qwen2", vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=1, max_length=8).save_pretrained(
        tmp_path
    )
    write_tokenizer(tokenizer.config(), tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    messages = ["a dog", "red?", "no"]
    assert rendered(read, messages) == rendered(source, messages)
    assert read(rendered(read, messages), add_special_tokens=False)["input_ids"] == row_of(tokenizer, messages)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.control.end_of_action
    again = ChatTokenizer(tmp_path, RowFormat.from_chat_template(tmp_path))  # by path
    assert again.row_format == tokenizer.row_format
    assert again.control == tokenizer.control


OF_TOOLS = ["<|im_end|>\n<|im_start|>user\n", "<tool_response>\n", "\n</tool_response>"]
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
    for _ in range(25):
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
    for case in range(25):
        turns = dialogue(
            draw, pieces=[*PIECES, *MARKERS, *OF_TOOLS], roles=roles, system="start>system" in row_format.joins
        )
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


def test_a_fixed_system_prompt_leaves_no_place_for_another():
    source = tokenizer_of(EXACT["chatml"])
    row_format = RowFormat.from_chat_template(source, system="Be brief.")
    assert "assistant>tool" in row_format.joins
    episode = Episode([Turn("Be long.", role="system"), Turn("hi"), Turn("yo", 1.0)], terminated=True)
    with pytest.raises(ValueError, match=r"cannot have 'start>system'.*has a system prompt"):
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


def test_the_end_of_the_text_is_not_written(source):
    """Phi-3 adds a token when nobody is to answer."""
    row_format = RowFormat.from_chat_template(source)
    closed = rendered(source, ["a", "b", "c"], answer=False)
    written = row_format.render(chat("a", "b", "c"), answer=False)
    assert closed.startswith(written)
    assert closed[len(written) :] in ("", "<|endoftext|>")
