"""What an agent reads before it answers, and what comes of its answer."""

from __future__ import annotations

import json

import pytest
import torch

from tests.data.chat_templates import CHATML, EXACT, FIRST_PROMPT_ONLY, IM, TOOL_CHATML, Family, tokenizer_of
from tests.modules.toys import CONTROL, TOKENIZER, tiny_lm
from torchrl_lang.modules import UtteranceActor, causal_lm, language_actor, load_agent, save_agent
from torchrl_lang.modules.reply import chat
from torchrl_lang.text import ChatTokenizer, RowFormat
from torchrl_lang.text.messages import encode_dialogue
from torchrl_lang.text.tokenizer_files import transformers_tokenizer

SYSTEM, QUESTION = {"role": "system", "content": "Short."}, {"role": "user", "content": "2 + 2?"}
WEATHER = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def look(place: str):
    """
    Look at a place.

    Args:
        place: where
    """


def expected(source, messages, **options):
    return source.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)


@pytest.mark.parametrize("fixed", [{}, {"system": "Play."}, {"system": "Play.", "tools": [look]}])
def test_the_prompt_is_the_one_of_transformers(fixed):
    """Whatever system prompt and tools the rows of training have."""
    source = tokenizer_of(Family(CHATML, IM, "<|im_end|>", pad="<|endoftext|>"))
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, **fixed))
    tokenizer = ChatTokenizer.from_config(json.loads(json.dumps(tokenizer.config())))
    own = [{"role": "system", "content": fixed["system"]}] if fixed else []
    tools = fixed.get("tools")
    several = [QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "sure?"}]
    for messages in ([QUESTION], [SYSTEM, QUESTION], [SYSTEM, *several]):
        read = messages if messages[0] is SYSTEM else [*own, *messages]
        assert encode_dialogue(messages, tokenizer).tokens == expected(source, read, tools=tools)
        for given in ([look], [WEATHER]):
            assert encode_dialogue(messages, tokenizer, tools=given).tokens == expected(source, read, tools=given)
    assert encode_dialogue(["2 + 2?", "4", "sure?"], tokenizer).tokens == expected(source, own + several, tools=tools)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen3", "qwen3 without thinking", "deepseek"])
def test_a_dialogue_that_the_assistant_begins(name):
    family = (EXACT | FIRST_PROMPT_ONLY)[name]
    source = tokenizer_of(family)
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source, **family.options))
    hello = {"role": "assistant", "content": "hello"}
    for messages in ([hello, QUESTION], [QUESTION, hello, hello, QUESTION]):
        assert encode_dialogue(messages, tokenizer).tokens == expected(source, messages, **family.options)


def test_dialogues_that_nobody_answers():
    gemma = tokenizer_of(EXACT["gemma"])
    tokenizer = ChatTokenizer(gemma, RowFormat.from_chat_template(gemma))
    answered = [QUESTION, {"role": "assistant", "content": "4"}]
    for dialogue, given, message in (
        (answered, {}, "The last of the 2 messages is the agent's: give the user's answer"),
        (["hi", "yo"], {}, "The last of the 2 messages"),
        ([SYSTEM, QUESTION], {}, "System role not supported"),
        ([answered[1], QUESTION], {}, "Roles must alternate"),
        ([{"role": "user"}], {}, "message 1"),
        ([{"role": "boss", "content": "hi"}], {}, "message 1"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_dialogue(dialogue, tokenizer, **given)
    with pytest.raises(ValueError, match="tools are written by a chat template"):
        encode_dialogue(["a"], TOKENIZER, tools=[look])
    with pytest.raises(ValueError, match="no messages of the roles"):
        encode_dialogue([SYSTEM, {"role": "user", "content": "a"}], TOKENIZER)


class Says:
    """Makes a language model's actor write given tokens."""

    def __init__(self, agent, texts):
        self.agent, self.texts, self.prompts = agent, iter(texts), []

    def __call__(self, rows):
        tokenizer, control = self.agent.tokenizer, self.agent.tokenizer.control
        self.prompts += [tokenizer.decode(row["tokens"][row["attention_mask"]]) for row in rows]
        ids = [[*tokenizer.encode_action(next(self.texts)), control.end_of_action] for _ in range(len(rows))]
        width = max(map(len, ids))
        return rows.set("action", torch.tensor([[*each, *[control.pad] * (width - len(each))] for each in ids]))


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    source = tokenizer_of(Family(TOOL_CHATML, IM, "<|im_end|>", ("<tool_call>", "</tool_call>"), pad="<|endoftext|>"))
    tokenizer = ChatTokenizer(source, RowFormat.from_chat_template(source))
    lm = causal_lm("qwen2", vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2, max_length=400)
    policy = UtteranceActor(language_actor(lm), tokenizer.control, 6, temperature=0.5)
    return load_agent(save_agent(tmp_path_factory.mktemp("agent") / "agent", policy, tokenizer), seed=0)


def test_a_call_of_a_tool_and_its_answer(agent, monkeypatch):
    call = '<tool_call>\n{"name": "look", "arguments": {"place": "up"}}\n</tool_call>'
    says = Says(agent, [call, "It is dark."])
    monkeypatch.setattr(type(agent.policy), "forward", lambda self, rows: says(rows))
    messages = [SYSTEM, QUESTION]
    messages.append(agent.reply(messages))
    function = {"name": "look", "arguments": {"place": "up"}}
    assert messages[-1] == {
        "role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]
    }  # fmt: skip
    messages.append({"role": "tool", "content": "night"})
    assert agent.reply(messages) == {"role": "assistant", "content": "It is dark."}
    source = transformers_tokenizer(agent.tokenizer)
    prompts = [source.apply_chat_template(messages[:n], tokenize=False, add_generation_prompt=True) for n in (2, 4)]
    assert says.prompts == prompts
    assert call in prompts[1]


def test_a_batch_answers_as_each_dialogue_alone(agent):
    dialogues = [[QUESTION], [SYSTEM, QUESTION], ["hi", "yo", "2 + 2?"]]
    sampled = agent.replies(dialogues)
    assert [type(answer) for answer in sampled] == [dict, dict, str]
    agent.policy.method = "greedy"
    together = agent.replies(dialogues)
    assert together == [agent.reply(dialogues[0]), agent.reply(messages=dialogues[1]), agent.reply(*dialogues[2])]


def test_a_text_or_a_message_is_no_dialogue(agent):
    for call in (lambda: agent.replies(["hi", "ho"]), lambda: agent.reply(QUESTION), lambda: agent.replies([])):
        with pytest.raises(ValueError, match="a dialogue or more, each a list of messages or texts, got"):
            call()
    assert isinstance(agent.reply([]), str)
    with pytest.raises(ValueError, match="tokens and an action exceed the model's 400 positions: shorten the dialogue"):
        agent.reply("1 " * 400)


def test_an_agent_without_a_chat_template_takes_texts_and_messages(tmp_path):
    policy = UtteranceActor(language_actor(tiny_lm()), CONTROL, 4, method="greedy")
    agent = load_agent(save_agent(tmp_path / "agent", policy, TOKENIZER))
    texts = ["ab", "c", "a"]
    said = agent.reply(*texts)
    assert isinstance(said, str)
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    assert agent.reply(messages) == {"role": "assistant", "content": said}
    assert isinstance(agent.reply(), str)


def test_a_dialogue_in_a_terminal():
    read = []

    def answer(messages):
        read.append([message["content"] for message in messages])
        if messages[-1]["content"] == "bad":
            raise ValueError("cannot be written")
        return {"role": "assistant", "content": "yo", **({"tool_calls": [{"n": 1}]} if len(messages) > 2 else {})}

    lines, shown = iter(["hi", "bad", "", "more", "/no", "/system Be brief.", "hey", "/reset", "again"]), []

    def ask(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    messages = chat(answer, input_fn=ask, output_fn=shown.append)
    assert read == [["hi"], ["hi", "yo", "bad"], ["hi", "yo", "more"], ["Be brief.", "hey"], ["Be brief.", "again"]]
    assert [message["content"] for message in messages] == ["Be brief.", "again", "yo"]
    said = ["yo", "No answer: cannot be written", 'yo\n{"n": 1}', "There is no command /no", "A new dialogue.", "yo"]
    assert [text.startswith(start) for text, start in zip(shown[1:], said, strict=False)] == [True] * 6
    lines = iter(["/quit", "hi"])
    assert chat(answer, input_fn=ask, output_fn=shown.append) == []
