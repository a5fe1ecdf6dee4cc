"""Calls of tools in the text of an utterance, written and read with the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from torchrl_lang._files import one_line, shorten
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.template_strings import Message

__all__ = ["read_utterance", "render_messages", "write_utterance"]

_MARK = "Xm1X"
_QUESTION = {"role": "user", "content": "?"}


def render_messages(messages: Sequence[Message], tokenizer: ChatTokenizer) -> str:
    """The chat template's text of messages, without a system prompt or tools of the row format.

    Raises:
        ValueError: the row format has no template, or the template refuses the messages.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

    template = tokenizer.row_format.template
    if template is None:
        raise ValueError("The row format has no chat template to write calls of tools with: derive it from one.")
    names = {**tokenizer.roles, "pad_token": tokenizer.decode([tokenizer.control.pad])}
    try:
        return render_jinja_template([list(messages)], chat_template=template, **names)[0][0]
    except Exception as error:  # templates raise Jinja's errors, with a message of their own
        raise ValueError(f"The chat template refuses these messages: {one_line(error)}.") from error


def write_utterance(message: Message, tokenizer: ChatTokenizer) -> str:
    """The text of an utterance as the template writes a message of the assistant, with its calls and thoughts.

    Raises:
        ValueError: the template cannot write it after a message of the user.
    """
    before, after = _frame(tokenizer)
    written = render_messages([_QUESTION, message], tokenizer)
    if not (written.startswith(before) and written.endswith(after)):
        raise ValueError(f"The chat template writes {shorten(str(message))} unlike other utterances.")
    return written[len(before) : len(written) - len(after)]


@lru_cache(maxsize=4)
def _frame(tokenizer: ChatTokenizer) -> tuple[str, str]:
    """What the template writes around an utterance after a message of the user."""
    written = render_messages([_QUESTION, {"role": "assistant", "content": _MARK}], tokenizer)
    before, _, after = written.partition(_MARK)
    return before, after


def read_utterance(text: str, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The message of the assistant that the template writes as this text; with ``tool_calls`` where there are any."""
    calls = list(_calls(text)) if tokenizer.row_format.template is not None else []
    for first in range(len(calls)):
        for message in _candidates(text, calls[first:], tokenizer):
            if _written(message, tokenizer) == text:
                return message
    return {"role": "assistant", "content": text}


def _candidates(text: str, calls: Sequence[Mapping[str, Any]], tokenizer: ChatTokenizer) -> Iterator[dict[str, Any]]:
    """Messages with these calls, and the contents that ``text`` may have beside them."""
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": dict(call)} for call in calls],
    }
    yield message
    before, found, after = _written({**message, "content": _MARK}, tokenizer).partition(_MARK)
    if found and text.startswith(before) and text.endswith(after):
        yield {**message, "content": text[len(before) : len(text) - len(after)]}


def _written(message: Message, tokenizer: ChatTokenizer) -> str:
    """The template's text of an utterance; empty where it cannot write these calls."""
    try:
        return write_utterance(message, tokenizer)
    except ValueError:
        return ""


def _calls(text: str) -> Iterator[dict[str, Any]]:
    """The objects in a text that have a name and arguments."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, end = None, place + 1
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            for key in ("arguments", "parameters"):  # Llama's templates write the latter
                if key in value:
                    yield {"name": value["name"], "arguments": value[key]}
        place = text.find("{", end)
