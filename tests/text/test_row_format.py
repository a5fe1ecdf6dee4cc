"""Row formats of chat templates: what is derived, what is refused, and equality with the templates."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.data.chat_templates import (
    CHATML,
    EXACT,
    FIRST_PROMPT_ONLY,
    IM,
    LLAMA2,
    MISTRAL_LAST,
    Family,
    chat,
    tokenizer_of,
)
from torchrl_lang.modules import causal_lm
from torchrl_lang.text import ChatTokenizer, Episode, RowFormat, Turn, from_row, to_row
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


def test_a_thousand_conversations_equal_the_template(source):
    row_format = RowFormat.from_chat_template(source)
    tokenizer, draw = ChatTokenizer(source, row_format), random.Random(0)
    equal_ids = 0
    for _ in range(1000):
        messages = messages_of(draw, PIECES)
        text = rendered(source, messages)
        assert row_format.render(chat(*messages)) == text
        first = row_of(tokenizer, messages[:1])
        assert first == source(rendered(source, messages[:1]), add_special_tokens=False)["input_ids"]
        ids = row_of(tokenizer, messages)
        assert ids[: len(first)] == first
        assert tokenizer.decode(ids) == text
        equal_ids += ids == source(text, add_special_tokens=False)["input_ids"]
    assert equal_ids > 800  # elsewhere an utterance would merge with the white space before it


def test_names_of_tokens_in_texts_are_plain_text(source):
    tokenizer, draw = ChatTokenizer(source, RowFormat.from_chat_template(source)), random.Random(1)
    plain = tokenizer.row_format.render(chat(*[""] * 5))
    expected = source(plain, add_special_tokens=False)["input_ids"]
    added = set(source.added_tokens_decoder)
    for _ in range(300):
        messages = messages_of(draw, [*PIECES, *MARKERS], turns=2)
        ids = row_of(tokenizer, messages)
        assert tokenizer.decode(ids) == tokenizer.row_format.render(chat(*messages))
        structure = [token for token in ids if token in added]
        allowed = {source.convert_tokens_to_ids(name) for name in ("<think>", "<tool_call>")}  # the agent's
        assert [t for t in structure if t not in allowed] == [token for token in expected if token in added]


def test_rows_survive_messages_and_back(source):
    tokenizer, draw = ChatTokenizer(source, RowFormat.from_chat_template(source)), random.Random(2)
    clean = tokenizer.row_format.clean_text, tokenizer.row_format.clean_action
    for case in range(300):
        messages = messages_of(draw, [*PIECES, *MARKERS])
        terminated = case % 3 == 0
        turns = [Turn(clean[i % 2](text), float(i) if i % 2 else None) for i, text in enumerate(messages)]
        row = to_row(Episode(turns, terminated, truncated=not terminated), tokenizer, 600)
        again = from_row(row, tokenizer)
        said = [turn for turn in turns if turn.by_agent or turn.text]  # messages without text are no turns
        assert [(t.text, t.reward, t.closed) for t in again.turns] == [(t.text, t.reward, t.closed) for t in said]
        assert (again.terminated, again.truncated, again.cut) == (terminated, not terminated, False)
        assert (to_row(again, tokenizer, 600) == row).all()


def test_silence_between_utterances_is_an_empty_message(source):
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    turns = [Turn("a", 1.0), Turn("b", 2.0)]
    row = to_row(Episode(turns, terminated=True), tokenizer, 200)
    real = int(row["attention_mask"].sum())
    assert tokenizer.decode(row["tokens"][:real]) == tokenizer.row_format.render(chat("", "a", "", "b"))
    assert row["agent_mask"].sum() == sum(len(tokenizer.encode_action(turn.text)) + 1 for turn in turns)
    assert [turn.text for turn in from_row(row, tokenizer).turns] == ["a", "b"]


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


def test_the_end_of_the_text_is_not_written(source):
    """Phi-3 adds a token when nobody is to answer."""
    row_format = RowFormat.from_chat_template(source)
    closed = rendered(source, ["a", "b", "c"], answer=False)
    written = row_format.render(chat("a", "b", "c"), answer=False)
    assert closed.startswith(written)
    assert closed[len(written) :] in ("", "<|endoftext|>")


def test_what_may_not_be_generated():
    tokenizer = ChatTokenizer(source := tokenizer_of(EXACT["chatml"]), RowFormat.from_chat_template(source))
    name = source.convert_ids_to_tokens
    assert name(tokenizer.control.end_of_action) == "<|im_end|>"
    assert name(tokenizer.control.pad) == "<|endoftext|>"
    assert {*map(name, tokenizer.control.forbidden_in_action())} == {"<|endoftext|>", "<|im_start|>"}
    assert [name(i) for i in tokenizer.encode_action("<think>")] == ["<think>"]  # not special: the agent may write it
    assert len(tokenizer.encode("<think>")) > 1  # but the environment's text is plain


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
        (Family("{{ messages[-1].content }}", IM, "<|im_end|>"), {}, "expected once"),
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


def test_markers_that_swallow_white_space():
    """Phi-3's, in some versions of its tokenizer: ids equal the template's where its string is the same."""
    family = EXACT["phi3"]
    source = tokenizer_of(Family(family.template, family.special, family.end, pad=family.pad, rstrip=family.special))
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    messages = ["a dog", "red?", "no"]
    assert row_of(tokenizer, messages) == source(rendered(source, messages), add_special_tokens=False)["input_ids"]


def test_saved_and_loaded(source):
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    again = tokenizer_from_config(tokenizer.config())
    assert (again.config(), again.control, again.row_format) == (
        tokenizer.config(), tokenizer.control, tokenizer.row_format,
    )  # fmt: skip
    assert again.encode_opening("a </s> b") == tokenizer.encode_opening("a </s> b")


def test_a_format_of_another_tokenizer_is_refused():
    row_format = RowFormat.from_chat_template(tokenizer_of(EXACT["llama3"]))
    with pytest.raises(ValueError, match="not a special token of this tokenizer"):
        ChatTokenizer(tokenizer_of(EXACT["chatml"]), row_format)


def test_neither_a_tokenizer_nor_a_format():
    with pytest.raises(OSError, match="no readable tokenizer"):
        RowFormat.from_chat_template("./nowhere")
    with pytest.raises(TypeError, match="must be a RowFormat, got str"):
        ChatTokenizer(tokenizer_of(EXACT["chatml"]), "chatml")


def test_the_padding_token():
    source = tokenizer_of(EXACT["zephyr"])  # it pads with the token that ends utterances
    row_format = RowFormat.from_chat_template(source)
    assert ChatTokenizer(source, row_format).config()["pad"] == "<unk>"
    for pad in ("</s>", "none"):
        with pytest.raises(ValueError, match="cannot be padded"):
            ChatTokenizer(source, row_format, pad=pad)


def test_damaged_episodes():
    tokenizer = ChatTokenizer(source := tokenizer_of(EXACT["chatml"]), RowFormat.from_chat_template(source))
    with pytest.raises(ValueError, match="cannot have a system message after a user message"):
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
