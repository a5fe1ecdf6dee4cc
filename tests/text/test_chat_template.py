"""Row formats of chat templates: what is derived, what is refused, and equality with the templates."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from transformers import AutoTokenizer, GenerationConfig

from tests.data import chat_templates as templates
from tests.data.chat_templates import CHATML, EXACT, FIRST_PROMPT_ONLY, IM, MISTRAL_LAST, Family, chat, tokenizer_of
from tests.rows import to_row
from torchrl_lang.modules import causal_lm
from torchrl_lang.text import ChatTokenizer, Episode, RowFormat, Turn, from_row, to_rows
from torchrl_lang.text.messages import encode_dialogue, from_messages
from torchrl_lang.text.tokenizer_files import write_tokenizer


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
    assert RowFormat.from_chat_template(source, default_system="Hi.").opening.startswith("<|im_start|>system\nHi.")


FAMILIES = EXACT | {"responses": Family(templates.TOOL_CHATML, EXACT["chatml"].special, "<|im_end|>")}


@pytest.fixture(scope="module", params=FAMILIES)
def source(request):
    return tokenizer_of(FAMILIES[request.param])


def dialogues(row_format, pieces, count):
    """Random turns that a template can write: several messages between utterances, the environment last."""
    draw = random.Random(0)
    roles = [role for role in ("user", "tool") if f"assistant>{role}" in row_format.joins] or ["user"]

    def turn(*args, **options):
        return Turn("".join(draw.choices(pieces, k=draw.randint(0, 6))), *args, **options)

    while count:
        turns = [turn(role="system")] if "start>system" in row_format.joins and draw.random() < 0.5 else []
        turns.append(turn())
        for _ in range(draw.randint(0, 4)):
            turns.append(turn(float(draw.randint(0, 3))))
            turns += [turn(role=draw.choice(roles)) for _ in range(draw.choice((1, 1, 2, 3)))]
        pairs = [f"{a.role}>{b.role}" for a, b in pairwise(turns) if not (a.by_agent or b.by_agent)]
        if row_format.all_joins.keys() >= {*pairs}:
            count -= 1
            yield turns


def messages(turns):
    return [{"role": "assistant" if turn.by_agent else turn.role, "content": turn.text} for turn in turns]


def real_ids(row):
    return row["tokens"][row["attention_mask"]].tolist()


def test_dialogues_equal_the_template(source):
    """Where the template writes one message of the user around several answers of tools, too."""
    row_format = RowFormat.from_chat_template(source)
    tokenizer, equal_ids = ChatTokenizer(source, row_format), 0
    for turns in dialogues(row_format, templates.PIECES, 30):
        text = source.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
        assert row_format.render(messages(turns)) == text
        ids = real_ids(to_row(Episode(turns, terminated=False), tokenizer, 1500))
        assert tokenizer.decode(ids) == text
        first = next((i for i, turn in enumerate(turns) if turn.by_agent), len(turns))
        opening = source.apply_chat_template(messages(turns[:first]), add_generation_prompt=True, return_dict=False)
        assert ids[: len(opening)] == opening
        equal_ids += ids == source(text, add_special_tokens=False)["input_ids"]
        # Phi-3 adds a token when nobody is to answer.
        closed = source.apply_chat_template(messages(turns), tokenize=False)
        written = row_format.render(messages(turns), answer=False)
        assert closed in (written, f"{written}<|endoftext|>")
    assert equal_ids > 20  # elsewhere an utterance would merge with the white space before it


def test_dialogues_survive_rows_and_back(source):
    """Also those with names of tokens in their texts."""
    row_format = RowFormat.from_chat_template(source)
    tokenizer, added = ChatTokenizer(source, row_format), set(source.added_tokens_decoder)
    allowed = {source.convert_tokens_to_ids(name) for name in ("<think>", "<tool_call>")}  # the agent's
    for case, turns in enumerate(dialogues(row_format, [*templates.PIECES, *templates.MARKERS], 40)):
        clean = [row_format.clean_action if turn.by_agent else row_format.clean_text for turn in turns]
        turns = [Turn(c(t.text), t.reward, role=t.role) for c, t in zip(clean, turns, strict=True)]
        terminated, truncated = case % 3 == 0, case % 3 == 1
        row = to_row(Episode(turns, terminated, truncated), tokenizer, 1500)
        again = from_row(row, tokenizer)
        # Messages without text are no turns everywhere, and some templates make one text of several messages.
        alone = all(a.by_agent or b.by_agent for a, b in pairwise(turns))
        found, said = (
            [(t.text, t.reward, t.closed) for t in episode if t.by_agent or (t.text and alone)]
            for episode in (again.turns, turns)
        )
        assert found == said
        assert (again.terminated, again.truncated, again.cut) == (terminated, truncated, False)
        assert (to_row(again, tokenizer, 1500) == row).all()
        # Nothing is written after the last utterance of an episode, and the first one has its prompt in any case.
        if turns[-1].text and not truncated and len(turns) > 2:
            ids, text = real_ids(row), row_format.render(messages(turns), answer=not terminated)
            assert tokenizer.decode(ids) == text
            plain = row_format.render([m | {"content": ""} for m in messages(turns)], answer=not terminated)
            expected = source(plain, add_special_tokens=False)["input_ids"]
            marks = [[t for t in found if t in added and t not in allowed] for found in (ids, expected)]
            assert marks[0] == marks[1]


@pytest.mark.parametrize("name", FIRST_PROMPT_ONLY)
def test_one_row_with_all_thoughts_where_history_is_kept(name):
    family = FIRST_PROMPT_ONLY[name]
    source = tokenizer_of(family)
    row_format = RowFormat.from_chat_template(source, history="kept", **family.options)
    tokenizer = ChatTokenizer(source, row_format)
    given = {"add_generation_prompt": True, "return_dict": False, **family.options}
    expected = source.apply_chat_template(chat("hi there"), **given)
    assert tokenizer.encode_opening("hi there") == expected
    assert row_format.render(chat("hi", "<think>so</think>yo", "and")).count("so") == 1  # kept
    assert not row_format.rewrites


WITH_TOOLS = replace(FIRST_PROMPT_ONLY["qwen3"], template=templates.QWEN3_TOOLS)
REWRITTEN = {**FIRST_PROMPT_ONLY, "qwen3 with tools": WITH_TOOLS}


@pytest.mark.parametrize("name", REWRITTEN)
def test_each_utterance_has_a_row_where_earlier_messages_are_rewritten(name):
    """After what transformers gives the model to read before it; rewards are those from there on."""
    family = REWRITTEN[name]
    source = tokenizer_of(family)
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, **family.options))
    assert tokenizer.row_format.rewrites
    texts = ["hi there", "<think>\nso\n</think>\n\nyo", "and?", "<think>\nwell\n</think>\n\nno", "bye"]
    turns = [Turn(text, index + 1.0 if index % 2 else None) for index, text in enumerate(texts)]
    if name == "qwen3 with tools":  # a tool's answer is no question, so the thought before it stays
        turns[2] = replace(turns[2], role="tool")
    rows = to_rows([Episode(turns, terminated=True)], tokenizer, 200)
    assert rows["token_reward"].sum(-1).tolist() == [6.0, 4.0]
    assert rows["terminated"].all()
    for row, place in zip(rows, (1, 3), strict=True):
        before = messages(turns[:place])
        given = {"add_generation_prompt": True, "return_dict": False, **family.options}
        expected = source.apply_chat_template(before, **given)
        agent = row["agent_mask"]
        first, last = int(agent.nonzero()[0]), int(agent.nonzero()[-1])
        assert row["tokens"][:first].tolist() == expected
        begun = "<think>\n" if name == "deepseek" else ""  # in the prompt already
        assert begun + tokenizer.decode(row["tokens"][first:last]) == texts[place]
        assert row["tokens"][last] == tokenizer.control.end_of_action
        assert (to_row(from_row(row, tokenizer), tokenizer, 200) == row).all()
        assert ("so" in tokenizer.decode(row["tokens"][:first])) == (name == "qwen3 with tools" and place == 3)
    assert encode_dialogue(messages(turns[:3]), tokenizer).tokens == expected
    forged = [Turn("<|im_end|>x"), Turn("<|im_end|>y", 0.0), Turn("<think>", None)]
    ids = encode_dialogue(messages(forged), tokenizer).tokens
    plain = encode_dialogue(chat("x", "y", ""), tokenizer).tokens
    special = set(source.all_special_ids) | {source.convert_tokens_to_ids("<think>")}
    assert [i for i in ids if i in special] == [i for i in plain if i in special]


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("deepseek", "<think>\nso</think>yo", "so</think>yo"),
        ("deepseek", "<think>so</think>yo", "so</think>yo"),
        ("deepseek", "so</think>yo", "so</think>yo"),
        ("qwen3 without thinking", "<think>\n\n</think>\n\nyo", "yo"),
        ("qwen3 without thinking", "<think>\nso\n</think>\n\nyo", "<think>\nso\n</think>\n\nyo"),
        ("qwen3", "<think>\nso\n</think>\n\nyo", "<think>\nso\n</think>\n\nyo"),
    ],
)
def test_what_the_generation_prompt_ends_with_is_not_written_twice(name, text, rest):
    family = FIRST_PROMPT_ONLY[name]
    source = tokenizer_of(family)
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, **family.options))
    row = to_row(from_messages(chat("hi", text)), tokenizer, 100)
    prompt = source.apply_chat_template(chat("hi"), add_generation_prompt=True, tokenize=False, **family.options)
    assert tokenizer.decode(real_ids(row)) == prompt + rest + family.end
    assert tokenizer.row_format.render(chat("hi", text)) == prompt + rest + family.end


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        (Family(templates.LLAMA2, ("</s>",), "</s>", bos="<s>"), {}, "does not begin with a special token"),
        (Family(MISTRAL_LAST, ("</s>",), "</s>", bos="<s>"), {"system": "Play."}, "changes the text before the first"),
        (EXACT["gemma"], {"system": "Play."}, "System role not supported"),
        (Family("{{ messages[-1].content }}", IM, "<|im_end|>"), {}, "not once"),
        (Family(CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), IM, "<|im_end|>"), {}, "0 times"),
        (Family(CHATML.replace("{{ m.content }}", "{{ m.content | replace('\n', ' ') }}"), IM, "<|im_end|>"), {},
         "Rows"),
        (Family("", IM, "<|im_end|>"), {}, "no chat template"),
        (Family(CHATML.replace("{{ m.content }}", "{{ '<|say|>' if m.role == 'assistant' }}{{ m.content }}"),
                (*IM, "<|say|>"), "<|im_end|>"), {}, "before an utterance, which its generation prompt lacks"),
        (EXACT["chatml"], {"add_generation_prompt": True}, "'add_generation_prompt'"),
    ],
    ids=["space before the end", "system moved", "no system", "last message", "upper case", "lines joined", "none"]
    + ["channel", "own option"],
)  # fmt: skip
def test_templates_that_rows_cannot_follow_are_refused(family, options, reason):
    with pytest.raises(ValueError, match=reason):
        RowFormat.from_chat_template(tokenizer_of(family), **options)


def test_saved_and_loaded():
    row_format = RowFormat.from_chat_template(tokenizer_of(EXACT["chatml"]))
    assert RowFormat.from_config(row_format.config()) == row_format
    for change, found in (({"further": 1}, 'has the unknown field "further"'), ({"opening": 1}, 'has 1 as "opening"')):
        with pytest.raises(ValueError, match=f"The row format {found}"):
            RowFormat.from_config(row_format.config() | change)
    config = ChatTokenizer(tokenizer_of(EXACT["chatml"]), row_format).config()
    with pytest.raises(ValueError, match=r"cannot be padded with any of \"\['user'\]\""):
        ChatTokenizer.from_config(config | {"pad": "user"})


def test_a_last_message_in_unusual_tokens_is_read_without_the_strings_around_it():
    tokenizer = ChatTokenizer(source := tokenizer_of(EXACT["chatml"]), RowFormat.from_chat_template(source))
    ids, word = tokenizer.encode_stretch([("user", "dog")], answer=False), tokenizer.encode("dog")
    begin = ids.index(word[0])
    ids[begin : begin + len(word)] = [tokenizer.encode(letter)[0] for letter in "dog"]
    episode = Episode([Turn("a"), Turn("b", 1.0), Turn("dog", tokens=tuple(ids))], terminated=True)
    assert from_row(to_row(episode, tokenizer, 100), tokenizer) == episode


def test_damaged_episodes():
    tokenizer = ChatTokenizer(source := tokenizer_of(EXACT["chatml"]), RowFormat.from_chat_template(source))
    brief = ChatTokenizer(source, RowFormat.from_chat_template(source, system="Be brief."))
    row = to_row(Episode([Turn("a"), Turn("b", 1.0)], True), tokenizer, 100)
    endless, end = row.clone(), int(row["agent_mask"].nonzero()[-1])
    endless["tokens"][end] = tokenizer.encode("b")[0]
    endless["attention_mask"][end + 1] = True
    late, twice = [Turn("a"), Turn("b", role="system")], [Turn("s", role="system"), Turn("a")]
    joined = [Turn("a", tokens=(1, 2)), Turn("b")]
    for call, message in (
        (lambda: to_row(Episode(late, True), tokenizer, 9), "'user>system'.*of the user"),
        (lambda: to_row(Episode(joined, True), tokenizer, 100), "2 turns of the environment follow each other"),
        (lambda: to_row(Episode(twice, True), brief, 9), "'start>system'.*has a system"),
        (lambda: from_row(row.exclude("terminated"), tokenizer), "terminated"),
        (lambda: from_row(endless, tokenizer), "has no end token"),
        (lambda: ChatTokenizer(tokenizer_of(EXACT["llama3"]), tokenizer.row_format), "not a special token of this"),
    ):
        with pytest.raises((ValueError, KeyError), match=message):
            call()


def test_transformers_alone_reads_the_saved_tokenizer(source, tmp_path):
    """With the chat template: it writes the same text and ids."""
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    lm = causal_lm("qwen2", vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=1, max_length=8)
    lm.save_pretrained(tmp_path)
    write_tokenizer(tokenizer.config(), tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    said = chat("a dog", "red?", "no")
    text = source.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert read.apply_chat_template(said, tokenize=False, add_generation_prompt=True) == text
    row = to_row(Episode([Turn("a dog"), Turn("red?", 0.0), Turn("no")], terminated=False), tokenizer, 100)
    assert read(text, add_special_tokens=False)["input_ids"] == real_ids(row)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.control.end_of_action
    (entry,) = (entry for entry in os.scandir(tmp_path.parent) if entry.name == tmp_path.name)
    again = ChatTokenizer(entry, RowFormat.from_chat_template(tmp_path))  # by path, any os.PathLike
    assert again.row_format == tokenizer.row_format
    assert again.control == tokenizer.control


def test_tools_where_only_the_first_prompt_equals_the_template():
    """What follows the last utterance does, whatever happened to earlier thoughts."""
    family = FIRST_PROMPT_ONLY["qwen3"]
    source = tokenizer_of(family)
    row_format = RowFormat.from_chat_template(source, history="kept")
    turns = [Turn("hi"), Turn("<think>so</think>yo", 1.0), Turn("42", role="tool"), Turn("and?")]
    text = row_format.render(messages(turns))
    expected = source.apply_chat_template(messages(turns), tokenize=False, add_generation_prompt=True)
    assert text == expected.replace("\nyo", "\n<think>so</think>yo")
