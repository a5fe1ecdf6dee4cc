"""Conversations as lists of messages, as ``transformers`` and TRL have them, to episodes and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from torchrl_lang._checks import is_history
from torchrl_lang._files import Record, shorten, validate
from torchrl_lang.text.chat_template import Message, RowFormat, tool_schemas
from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.rows import EncodedEpisode, encode_episode, plain_messages
from torchrl_lang.text.tokenizer_files import transformers_tokenizer
from torchrl_lang.text.tokenizers import Tokenizer

_OF_TEMPLATE = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of the assistant's messages that the template writes into the utterance."""
_DROPPED = ("name", "tool_call_id")
"""Keys that most templates do not write; those that do cannot be used."""


def from_messages(
    messages: Sequence[Message], tokenizer: Tokenizer | None = None, *, terminated: bool = True, truncated: bool = False
) -> Episode:
    """An episode from messages: the assistant is the agent, and the others are the environment.

    Args:
        messages: each has a ``role`` ("system", "user", "tool" or "assistant") and a ``content``, a text or a list of
            text parts. A message of the assistant may have a ``reward`` (default 0), and ``tool_calls`` or
            ``reasoning_content``, which become part of its text as the chat template writes them.
        tokenizer: the :class:`~torchrl_lang.text.ChatTokenizer` of the rows; needed for calls of tools.
        terminated: the task ended; see :class:`~torchrl_lang.text.Episode`.
        truncated: a limit ended it.

    Raises:
        ValueError: a message is malformed, or the chat template writes what rows do not keep, such as ``name``.

    Examples:
        >>> from torchrl_lang.text.messages import from_messages
        >>> messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4", "reward": 1}]
        >>> from_messages(messages).total_reward
        1.0
    """
    turns = [_turn(message, f"message {number}", tokenizer) for number, message in enumerate(messages, start=1)]
    found = [key for key in _DROPPED if any(key in message for message in messages)]
    if found and isinstance(tokenizer, ChatTokenizer):
        plain = [{key: value for key, value in message.items() if key not in _DROPPED} for message in messages]
        if tokenizer.render(messages) != tokenizer.render(plain):
            raise ValueError(f"the chat template writes {found} of the messages, which rows do not keep: remove them")
    return Episode(turns, terminated, truncated)


def to_messages(episode: Episode, tokenizer: Tokenizer | None = None) -> list[dict[str, Any]]:
    """The messages of an episode; :func:`from_messages` makes the same episode of them again.

    Args:
        episode: for example from :func:`~torchrl_lang.text.from_row`.
        tokenizer: with a :class:`~torchrl_lang.text.ChatTokenizer` calls of tools in an utterance become
            ``tool_calls``, where its template writes them so, and an utterance that follows none of the environment's
            messages has an empty one of the user before it, as in its row.

    Examples:
        >>> from torchrl_lang.text import Episode, Turn, to_messages
        >>> to_messages(Episode([Turn("hi"), Turn("yo", 0.0)], terminated=True))
        [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yo'}]
    """
    messages: list[dict[str, Any]] = []
    chat = tokenizer if isinstance(tokenizer, ChatTokenizer) else None
    for turn in episode.turns:
        if not turn.by_agent:
            messages.append({"role": turn.role, "content": turn.text})
            continue
        if chat and (not messages or messages[-1]["role"] == "assistant"):
            messages.append({"role": "user", "content": ""})  # as the row has it
        message = read_utterance(turn.text, chat, exact=True) if chat else {"role": "assistant", "content": turn.text}
        messages.append({**message, "reward": turn.reward} if turn.reward else message)
    return messages


Dialogue = Sequence[str] | Sequence[Message]
"""Messages, or the texts of the user and the agent in turn, the user's first."""


def encode_dialogue(dialogue: Dialogue, tokenizer: Tokenizer, *, tools: Sequence[Any] | None = None) -> EncodedEpisode:
    """The row of a dialogue up to the place where the agent writes, encoded as rows of training are.

    With a :class:`~torchrl_lang.text.ChatTokenizer` it is written as its chat template writes the dialogue with a
    generation prompt. A system prompt or tools that the row format was not made with are written by the template, too,
    and so is a dialogue that the assistant begins: rows of training have an empty message of the user before it.

    Args:
        dialogue: as :func:`from_messages` takes messages, or texts. Without any the agent takes the first turn.
        tokenizer: of the agent.
        tools: JSON schemas or documented functions; default those of the row format.

    Raises:
        ValueError: the last message is the agent's, a message is malformed, or the template or the tokenizer cannot
            write it.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.text.messages import encode_dialogue
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> tokenizer.decode(encode_dialogue(["a", "b", "c"], tokenizer).tokens)
        '<s>a</s>b</a>c</s>'
    """
    roles = ("user", "assistant")
    messages: list[Any] = [
        {"role": roles[index % 2], "content": each} if isinstance(each, str) else each
        for index, each in enumerate(dialogue)
    ]
    if isinstance(tokenizer, ChatTokenizer):
        tokenizer, messages = _with_prompt_of(messages, tokenizer, tools)
    elif tools is not None:
        raise ValueError("tools are written by a chat template, which this agent's tokenizer has not: leave them out.")
    episode = from_messages(messages, tokenizer, terminated=False, truncated=True)
    if episode.turns and episode.turns[-1].by_agent:
        raise ValueError(f"The last of the {len(dialogue)} messages is the agent's: give the user's answer to it, too.")
    if isinstance(tokenizer, ChatTokenizer) and episode.turns:
        # Rows have an empty message of the user where utterances follow each other.
        has_gaps = len(plain_messages(episode.turns)) > len(episode.turns)
        if has_gaps or tokenizer.row_format.rewrites:
            prompt = tokenizer.encode_prompt(to_messages(episode))
            episode = replace(episode, turns=[Turn("", tokens=tuple(prompt))])
    return encode_episode(episode, tokenizer)


def _with_prompt_of(
    messages: list[Any], tokenizer: ChatTokenizer, tools: Sequence[Any] | None
) -> tuple[ChatTokenizer, list[Any]]:
    """The tokenizer with the system prompt and tools of a dialogue in its opening, and the messages that are left.

    A system prompt that rows may begin with stays a message.
    """
    found, system = tokenizer.row_format, None
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        system = messages[0].get("content")
    if tools is None and (system is None or "start>system" in found.joins):
        return tokenizer, messages
    given = json.dumps(found.tools if tools is None else tool_schemas(tools))
    rest = messages if system is None else messages[1:]
    return _with_prompt(tokenizer, found.system if system is None else _joined(system), given), rest


@lru_cache(maxsize=16)
def _with_prompt(tokenizer: ChatTokenizer, system: str | None, tools: str) -> ChatTokenizer:
    """The tokenizer with another system prompt and other tools, JSON, in the opening of its rows."""
    found, other = tokenizer.row_format, copy(tokenizer)
    source = _source(tokenizer)
    given: Any = {"system": system, "tools": json.loads(tools), **found.template_options}
    other.row_format = RowFormat.from_chat_template(source, history=found.history, **given)
    return other


_source = lru_cache(maxsize=4)(transformers_tokenizer)


def messages_from_history(history: Any) -> list[Any]:
    """The messages of one of TorchRL's ``History`` objects, as :func:`from_messages` and data readers take them.

    Calls of tools are kept as ``tool_calls``; answers of tools (``tool_responses``) are the content of a message of
    the tool, one each. Placeholders (role ``"<none>"``) and the flag ``is_complete`` are left out.

    Args:
        history: ``[time]``, or ``[*B, time]`` for nested lists of conversations.

    Raises:
        TypeError: it is a single message, or no ``History``, for instance the ``ChatHistory`` that holds three of them.

    Examples:
        >>> from torchrl.data.llm import History
        >>> from torchrl_lang.text import messages_from_history
        >>> messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
        >>> messages_from_history(History.from_chats(messages)) == messages
        True
    """
    if not is_history(history):
        advice = "pass one of its histories, such as steps['history'].full"
        raise TypeError(f"It takes a History with the messages last, got {type(history).__name__}: {advice}.")
    if isinstance(history.content, str):
        raise TypeError("It takes a History with the messages last, got a single message: pass lazy_stack([history]).")
    return _plain(history.tolist(tolist_first=True))


def _plain(messages: Any) -> list[Any]:
    if messages and not isinstance(messages[0], Mapping):
        return [_plain(conversation) for conversation in messages]
    found = []
    for message in messages:
        if message["role"] == "<none>":
            continue
        kept = {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key) is not None}
        found += [{**kept, "content": answer} for answer in message.get("tool_responses") or ()] or [kept]
    return found


def _joined(content: Any) -> Any:
    """A list of text parts as one text; other contents as they are."""
    is_text = isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )
    return "".join(part["text"] for part in content) if is_text else content


class MessageRecord(Record):
    """A message as ``transformers`` and TRL have it."""

    role: Literal["system", "user", "tool", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    reward: float | None = None
    tool_calls: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None
    name: Any = None
    tool_call_id: Any = None

    @model_validator(mode="after")
    def _check_role(self) -> MessageRecord:
        if self.role != "assistant" and (self.of_template or self.reward is not None):
            found = [*self.of_template] or "a reward"
            raise ValueError(f"has {found}, but only messages of the assistant may, not of {self.role!r}")
        if "content" not in self.model_fields_set and not self.of_template:
            raise ValueError("has no text as 'content'")
        return self

    @property
    def of_template(self) -> dict[str, Any]:
        """The entries that the template writes into the utterance beside the content."""
        return {key: value for key in _OF_TEMPLATE if (value := getattr(self, key))}


def _turn(content: Any, where: str, tokenizer: Tokenizer | None) -> Turn:
    if isinstance(content, Mapping):  # tables fill gaps with None
        content = {key: value for key, value in content.items() if value is not None}
    if is_history(content):
        raise ValueError(f"{where} is a History of TorchRL: give the messages of messages_from_history(history)")
    message = validate(MessageRecord, content, where)
    if message.role != "assistant":
        return Turn(message.content, role=message.role)
    text, further = message.content, message.of_template
    if further:
        if not isinstance(tokenizer, ChatTokenizer):
            raise ValueError(f"{where}: {[*further]} are written by a chat template: use a ChatTokenizer (--chat)")
        whole = {"role": "assistant", "content": text, **further}
        text = write_utterance(whole, tokenizer)
        for key in further:
            if text == write_utterance({name: value for name, value in whole.items() if name != key}, tokenizer):
                raise ValueError(f"{where}: the chat template does not write {key!r}: use another one, or remove it")
    return Turn(text, message.reward or 0.0)


_MARK = "Xm1X"
_QUESTION = {"role": "user", "content": "?"}


def write_utterance(message: Message, tokenizer: ChatTokenizer) -> str:
    """The text of an utterance as the template writes a message of the assistant, with its calls and thoughts.

    Raises:
        ValueError: the template cannot write it after a message of the user.
    """
    written = tokenizer.render([_QUESTION, message])
    for before, after in _frames(tokenizer):
        if written.startswith(before) and written.endswith(after):
            return written[len(before) : len(written) - len(after)]
    raise ValueError(f"The chat template writes {shorten(str(message))} unlike other utterances.")


@lru_cache(maxsize=4)
def _frames(tokenizer: ChatTokenizer) -> tuple[tuple[str, str], tuple[str, str]]:
    """Texts that the template writes around an utterance after a message of the user.

    Those around one without a thought, for which some templates write an empty one; and the generation prompt.
    """
    written = tokenizer.render([_QUESTION, {"role": "assistant", "content": _MARK}])
    before, _, after = written.partition(_MARK)
    return (before, after), (tokenizer.render([_QUESTION], add_generation_prompt=True), after)


def read_utterance(text: str, tokenizer: ChatTokenizer, *, exact: bool = False) -> dict[str, Any]:
    """The message of the assistant that the template writes as this text; with ``tool_calls`` where there are any.

    Unless it is to be ``exact``, spaces and the order of keys in the JSON of a call may differ.
    """
    row_format, spell = tokenizer.row_format, str if exact else _in_one_spelling
    calls: list[dict[str, Any]] = []
    if row_format.template is not None:
        calls = [*(call for _, _, call in _calls(text)), *_tagged_calls(text, row_format.tools or ())]
    spelled = spell(text)

    def written(message: Message) -> str:
        return spell(_written(message, tokenizer))

    for first in range(len(calls)):
        for message in _candidates(spelled, calls[first:], written):
            if written(message) == spelled:
                return message
    return {"role": "assistant", "content": text}


def _written(message: Message, tokenizer: ChatTokenizer) -> str:
    """The template's text of an utterance; empty where it cannot write these calls."""
    try:
        return write_utterance(message, tokenizer)
    except ValueError:
        return ""


def _in_one_spelling(text: str) -> str:
    """The text with the JSON of its calls in one spelling."""
    out, place = "", 0
    for start, end, call in _calls(text):
        out, place = out + text[place:start] + json.dumps(call, sort_keys=True), end
    return out + text[place:]


def _candidates(
    text: str, calls: Sequence[Mapping[str, Any]], written: Callable[[Message], str]
) -> Iterator[dict[str, Any]]:
    """Messages with these calls, and the contents that ``text`` may have beside them."""
    called = [{"type": "function", "function": dict(call)} for call in calls]
    message = {"role": "assistant", "content": "", "tool_calls": called}
    yield message
    before, found, after = written({**message, "content": _MARK}).partition(_MARK)
    if found and text.startswith(before) and text.endswith(after):
        yield {**message, "content": text[len(before) : len(text) - len(after)]}


def _calls(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The objects in a text that have a name and arguments, and where they begin and end."""
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value, end = None, place + 1
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            for key in ("arguments", "parameters"):  # Llama's templates write the latter
                if key in value:
                    yield place, end, {"name": value["name"], "arguments": value[key]}
                    break
        place = text.find("{", end)


_FUNCTION = re.compile(r"<function=([^>\s]+)>\n(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n(.*?)\n</parameter>\n", re.DOTALL)


def _tagged_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The calls in a text as Qwen3.5 writes them, in tags; arguments are JSON unless a tool has them as strings."""
    functions = [tool.get("function", tool) for tool in tools]
    known = {each.get("name"): each.get("parameters", {}).get("properties", {}) for each in functions}
    for name, inside in _FUNCTION.findall(text):
        kinds = {key: kind.get("type") for key, kind in known.get(name, {}).items()}
        values = {key: text if kinds.get(key) == "string" else _value(text) for key, text in _PARAMETER.findall(inside)}
        yield {"name": name, "arguments": values}


def _value(text: str) -> Any:
    """The value that a text is as JSON, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
