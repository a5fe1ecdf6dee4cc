"""Conversations as lists of messages, as ``transformers`` and TRL have them, to episodes and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import ROLES, Episode, Turn
from torchrl_lang.text.json_checks import check_keys, read_number, show
from torchrl_lang.text.template_strings import Message
from torchrl_lang.text.tokenizers import Tokenizer
from torchrl_lang.text.tool_calls import read_utterance, render_messages, write_utterance

__all__ = ["from_messages", "to_messages"]

_OF_TEMPLATE = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of the assistant's messages that the template writes into the utterance."""
_DROPPED = ("name", "tool_call_id")
"""Keys that most templates do not write; those that do cannot be used."""


def from_messages(
    messages: Sequence[Message],
    tokenizer: Tokenizer | None = None,
    *,
    terminated: bool = True,
    truncated: bool = False,
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
        >>> from torchrl_lang.text import from_messages
        >>> messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4", "reward": 1}]
        >>> from_messages(messages).total_reward
        1.0
    """
    turns = [_turn(message, f"message {number}", tokenizer) for number, message in enumerate(messages, start=1)]
    if any(key in message for message in messages for key in _DROPPED) and isinstance(tokenizer, ChatTokenizer):
        _check_dropped(messages, tokenizer)
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
        message = read_utterance(turn.text, chat) if chat else {"role": "assistant", "content": turn.text}
        messages.append({**message, "reward": turn.reward} if turn.reward else message)
    return messages


def _turn(message: Any, where: str, tokenizer: Tokenizer | None) -> Turn:
    check_keys(message, ("role", "content", "reward", *_OF_TEMPLATE, *_DROPPED), where)
    role = message.get("role")
    if role != "assistant" and role not in ROLES:
        raise ValueError(f"{where}: 'role' must be one of {['assistant', *ROLES]}, got {show(role)}")
    further = [key for key in _OF_TEMPLATE if message.get(key) is not None]
    if role != "assistant":
        if further or message.get("reward") is not None:
            raise ValueError(
                f"{where}: only messages of the assistant may have {further or 'a reward'}, this one has the role "
                f"{role!r}"
            )
        return Turn(_text(message.get("content"), where), role=role)
    reward = message.get("reward")
    earned = 0.0 if reward is None else read_number(reward, f"{where}: 'reward'")
    if not further:
        return Turn(_text(message.get("content"), where), earned)
    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError(f"{where}: {further} are written by a chat template: use a ChatTokenizer")
    parts = {key: value for key, value in message.items() if key not in ("reward", *_DROPPED) and value is not None}
    content = _text(parts["content"], where) if "content" in parts else ""
    return Turn(write_utterance({**parts, "content": content}, tokenizer), earned)


def _text(content: Any, where: str) -> str:
    """A content as one text."""
    if isinstance(content, list):
        return "".join(_part(part, where) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: 'content' must be a text or a list of text parts, got {show(content)}")
    return content


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{where}: a part of 'content' must be {{'type': 'text', 'text': ...}}, got {show(part)}")
    return text


def _check_dropped(messages: Sequence[Message], tokenizer: ChatTokenizer) -> None:
    """Raise ValueError if the template writes keys that rows do not keep."""
    plain = [{key: value for key, value in message.items() if key not in _DROPPED} for message in messages]
    if render_messages(messages, tokenizer) != render_messages(plain, tokenizer):
        found = [key for key in _DROPPED if any(key in message for message in messages)]
        raise ValueError(f"the chat template writes {found} of the messages, which rows do not keep: remove these keys")
