"""Rows as the steps of TorchRL's chat environments, and back."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History

from tests.data.chat_templates import (
    EXACT,
    IM,
    MARKERS,
    PIECES,
    SMOLLM2,
    TOOL_CHATML,
    Family,
    chat_tokenizer,
    tokenizer_of,
)
from torchrl_lang.data import chat_from_rows, rows_from_chat
from torchrl_lang.schema import ROW_KEYS
from torchrl_lang.text import CharTokenizer, Episode, Turn, from_row, messages_from_history, to_messages, to_rows
from torchrl_lang.text.messages import from_messages

FAMILIES = EXACT | {"smollm2": Family(SMOLLM2, IM, "<|im_end|>", pad="<|endoftext|>")}
TOOLS = Family(TOOL_CHATML, EXACT["chatml"].special, "<|im_end|>", EXACT["chatml"].plain, pad="<|endoftext|>")


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request):
    return chat_tokenizer(FAMILIES[request.param])


def random_rows(tokenizer, count, pieces, seed=0):
    """Rows of dialogues of one to five utterances, some of them cut, with rewards and log-probabilities."""
    draw, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def text():
        return "".join(draw.choices(pieces, k=draw.randint(0, 6)))

    def episode():
        turns = [t for _ in range(draw.randint(1, 5)) for t in (Turn(text()), Turn(text(), draw.uniform(-2, 2)))]
        turns += [Turn(text())] if draw.random() < 0.7 else []
        kind = draw.randint(0, 3)
        return Episode(turns, terminated=kind in (0, 2), truncated=kind in (1, 2))

    rows = to_rows([episode() for _ in range(count)], tokenizer, 900)
    rows["token_log_prob"] = (torch.rand(rows["tokens"].shape, generator=g) - 1.5) * rows["agent_mask"]
    return rows


def assert_equal_rows(found, rows):
    real = rows["attention_mask"].sum(-1)
    assert found.batch_size == rows.batch_size
    assert torch.equal(found["attention_mask"].sum(-1), real)
    width = int(real.max())
    for key in (*ROW_KEYS, "token_log_prob"):
        ours, theirs = ((x[key][:, :width] * x["attention_mask"][:, :width]) for x in (rows, found))
        torch.testing.assert_close(theirs, ours, atol=1e-5 if key == "token_log_prob" else 0, rtol=0)
    assert torch.equal(found["terminated"], rows["terminated"])
    assert torch.equal(found["truncated"], rows["truncated"] | ~rows["terminated"])


def test_rows_survive_steps_of_chats(tokenizer):
    """Token by token, whatever the texts; ``DIALOGUES=10000`` tries as many of all families together."""
    count = int(os.environ.get("DIALOGUES", "210")) // len(FAMILIES) + 1
    rows = random_rows(tokenizer, count, [*PIECES, *MARKERS])
    steps = chat_from_rows(rows)
    assert_equal_rows(rows_from_chat(steps), rows)
    begins = rows["agent_mask"] & ~rows["agent_mask"].roll(1, -1)
    assert len(steps) == begins.sum() > count
    assert steps["next", "done"].sum() == count
    assert steps["next", "truncated"].sum() == (rows["truncated"] | ~rows["terminated"]).sum()
    for row, step in zip(rows, steps[steps["next", "done"].squeeze(-1)], strict=True):
        assert torch.equal(step["masks"].all_assistant_mask, row["agent_mask"][: len(step["tokens"].full)])
    for step, following in pairwise(steps[: len(steps) // 10]):
        if not step["next", "done"]:
            assert torch.equal(step["next", "tokens"].prompt, following["tokens"].prompt)
        tokens, assistant = step["tokens"], step["masks"].all_assistant_mask
        assert torch.equal(tokens.full, torch.cat([tokens.prompt, tokens.response]))
        assert torch.equal(tokens.full[assistant][-len(tokens.response) :], tokens.response)
        assert assistant.shape == step["masks"].all_attention_mask.shape == step["log_probs"].full.shape
        assert (step["log_probs"].response < 0).all()


def test_a_history_alone_gives_the_text_of_the_row(tokenizer):
    rows = random_rows(tokenizer, 8, PIECES)
    steps = chat_from_rows(rows, tokenizer)
    assert_equal_rows(rows_from_chat(steps), rows)
    for step in steps:
        messages = messages_from_history(step["history"].prompt)
        again = to_rows([from_messages(messages, tokenizer, terminated=False)], tokenizer, 900)[0]
        ids = again["tokens"][again["attention_mask"]].tolist()
        assert tokenizer.decode(ids) == tokenizer.decode(step["tokens"].prompt.tolist())
        assert step["history"].full[-1].content == step["history"].response[0].content
    *_, last = (messages_from_history(step["next", "history"].prompt) for step in steps)
    said = to_messages(from_row(rows[-1], tokenizer), tokenizer)
    assert last == [{key: message[key] for key in ("role", "content")} for message in said]


def test_a_history_that_would_give_another_text_is_refused():
    source = chat_tokenizer(EXACT["chatml"], system="Play.")
    rows = random_rows(source, 2, PIECES)
    with pytest.raises(ValueError, match=r"Leave tokenizer= out .* or give the row format's system prompt as system="):
        chat_from_rows(rows, source)
    steps = chat_from_rows(rows, source, system="Play.")
    assert steps[0]["history"].full.role == ["system", "user", "assistant"]
    with pytest.raises(KeyError, match=r"A History alone is text, which to_rows encodes: .*messages_from_history"):
        rows_from_chat(steps.select("history", "next"))


def test_rows_that_are_no_steps():
    letters = CharTokenizer.from_alphabet("ab")
    rows = to_rows([Episode([Turn("a"), Turn("b", 1.0)], True), Episode([Turn("a")], False)], letters, 8)
    one, inside = rows[:1], rows[:1].clone()
    inside["token_reward"][0, 3] = 1.0
    open_end = to_rows([Episode([Turn("a"), Turn("b", 1.0), Turn("", 0.0, closed=False)], True)], letters, 8)
    for wrong, options, message in (
        (rows, {}, "Row 1 has no utterance of the agent"),
        (inside, {}, "Row 0 has rewards within an utterance"),
        (one.exclude("terminated"), {}, "terminated"),
        (open_end, {"tokenizer": letters}, "Row 0 has 2 utterances, but tokens of 1"),
        (one[:0], {}, "at least one row"),
        (one.unsqueeze(0), {}, "at least one row"),
        (TensorDict({**one, "next": one}, batch_size=one.shape), {}, "steps of a rollout, not rows"),
        (one, {"tokenizer": tokenizer_of(TOOLS)}, "got TokenizersBackend|got PreTrainedTokenizerFast"),
        (one, {"system": "Play."}, "give the tokenizer of the rows, too"),
    ):
        with pytest.raises((KeyError, TypeError, ValueError), match=message):
            chat_from_rows(wrong, **options)


def test_steps_that_lack_something():
    letters = CharTokenizer.from_alphabet("ab")
    steps = chat_from_rows(to_rows([Episode([Turn("a"), Turn("b", 1.0)], True)], letters, 8))
    assert not rows_from_chat(steps.exclude(("next", "reward")))["token_reward"].any()
    for found, options in ((steps.exclude(("next", "terminated")), {}), (steps, {"reward_key": ("a", "score")})):
        with pytest.raises(KeyError, match="terminated" if not options else "score"):
            rows_from_chat(found, **options)
    for found in (steps[0], TensorDict(batch_size=[0])):
        with pytest.raises(ValueError, match=r"no step or no dimension of time in steps of shape .*unsqueeze\(0\)"):
            rows_from_chat(found)


def test_what_the_last_next_prompt_adds_by_hand():
    """The environment's last words, where they follow the row."""
    end = {"reward": [2.0], "done": [True], "terminated": [False], "truncated": [True]}
    tokens = {"prompt": torch.tensor([5, 6]), "response": torch.tensor([7])}
    for after, row in (([5, 6, 7, 8, 9], [5, 6, 7, 8, 9]), ([5, 6, 8, 9], [5, 6, 7])):
        step = TensorDict(tokens=tokens, next={**end, "tokens": {"prompt": torch.tensor(after)}})
        rows = rows_from_chat(lazy_stack([step]))
        assert rows["tokens"].tolist() == [row]
        assert rows["agent_mask"][0].tolist() == [index == 2 for index in range(len(row))]
        assert rows["token_reward"][0].tolist() == [2.0 * (index == 2) for index in range(len(row))]
    on_disk = rows.set("tokens", rows["tokens"].int())
    assert chat_from_rows(on_disk)[0]["tokens"].full.dtype == torch.int64


def test_messages_of_a_history_with_tools():
    tokenizer = chat_tokenizer(TOOLS)
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}
    messages = [
        {"role": "user", "content": "open it"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "locked"},
        {"role": "assistant", "content": "It is locked."},
    ]
    other = [*messages[:2], {"role": "tool", "content": "open"}, {"role": "assistant", "content": "Go in."}]
    history = History.from_chats([messages, other])
    assert messages_from_history(history) == [messages, other]
    assert messages_from_history(history[0]) == messages
    row = to_rows([from_messages(messages_from_history(history[0]), tokenizer)], tokenizer, 200)
    source = tokenizer_of(TOOLS)
    text = source.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(row["tokens"][row["attention_mask"]].tolist()) == text.removesuffix("\n")
    steps = chat_from_rows(row, tokenizer)
    assert messages_from_history(steps[1]["history"].full) == messages
    answers = History(role="tool", content="", tool_responses=["a", "b"])
    hidden = History(role="<none>", content="")
    answered = [{"role": "tool", "content": text} for text in ("a", "b")]
    assert messages_from_history(lazy_stack([answers, hidden])) == answered
    with pytest.raises(TypeError, match=r"got ChatHistory: pass one of its histories, such as steps\['history'\].full"):
        messages_from_history(steps[1]["history"])
    with pytest.raises(TypeError, match=r"got a single message: pass lazy_stack\(\[history\]\)"):
        messages_from_history(hidden)
