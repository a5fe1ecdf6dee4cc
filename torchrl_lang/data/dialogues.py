"""Parse dialogues in JSON, with an error for every mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from torchrl_lang.data.episodes import Episode, Turn
from torchrl_lang.storage import shorten
from torchrl_lang.storage.readers import unique_keys

__all__ = ["parse_dialogue"]

_BY_AGENT = {"user": False, "environment": False, "assistant": True, "agent": True}


def parse_dialogue(line: str, *, ignore: Sequence[str] = ()) -> Episode:
    """Read one line of JSON as an episode.

    The line is an object with ``turns``, a list of objects with ``role`` ("user" or "environment", "assistant" or
    "agent"), ``text`` and, for the agent, ``reward`` (default 0). The line's own ``reward`` is added to the agent's
    last turn. ``truncated`` means that a limit ended the dialogue (default false), ``terminated`` that the task ended
    (default: true unless truncated).

    Args:
        line: one JSON object.
        ignore: keys of the object to ignore; any other unknown key is an error.

    Raises:
        ValueError: the line is malformed; the message gives the reason.

    Examples:
        >>> from torchrl_lang.data import parse_dialogue
        >>> line = '{"turns": [{"role": "user", "text": "hi"}, {"role": "assistant", "text": "yo"}], "reward": 2}'
        >>> parse_dialogue(line)
        Episode(turns=(Turn(text='hi', ...), Turn(text='yo', reward=2.0, ...)), terminated=True, ...)
    """
    content = json.loads(line, object_pairs_hook=unique_keys)
    _check_keys(content, ("turns", "reward", "terminated", "truncated", *ignore), "the line")
    turns = content.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"'turns' must be a list of at least one turn, got {_show(turns)}")
    parsed = [_turn(turn, f"turn {index}") for index, turn in enumerate(turns, start=1)]
    total = _number(content.get("reward", 0), "'reward'")
    if total:
        last = max((index for index, turn in enumerate(parsed) if turn.by_agent), default=None)
        if last is None:
            raise ValueError("'reward' is added to the agent's last turn, but there is no turn of the agent")
        parsed[last] = Turn(parsed[last].text, reward=(parsed[last].reward or 0.0) + total)
    truncated = _flag(content, "truncated", default=False)
    return Episode(parsed, _flag(content, "terminated", default=not truncated), truncated)


def _turn(turn: Any, where: str) -> Turn:
    _check_keys(turn, ("role", "text", "reward"), where)
    role, text = turn.get("role"), turn.get("text")
    if not isinstance(role, str) or role not in _BY_AGENT:
        raise ValueError(f"{where}: 'role' must be one of {list(_BY_AGENT)}, got {_show(role)}")
    if not isinstance(text, str):
        raise ValueError(f"{where}: 'text' must be a string, got {_show(text)}")
    if _BY_AGENT[role]:
        return Turn(text, reward=_number(turn.get("reward", 0), f"{where}: 'reward'"))
    if "reward" in turn:
        raise ValueError(f"{where}: only turns of the agent may have a reward, this one has the role {role!r}")
    return Turn(text)


def _flag(content: dict[str, Any], key: str, *, default: bool) -> bool:
    flag = content.get(key, default)
    if not isinstance(flag, bool):
        raise ValueError(f"'{key}' must be true or false, got {_show(flag)}")
    return flag


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{what} must be a finite number, got {_show(value)}")
    return float(value)


def _check_keys(content: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a JSON object, got {_show(content)}")
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise ValueError(f"{where}: unknown keys {shorten(unknown)}, the known ones are {list(known)}")


def _show(value: Any) -> str:
    """A value as JSON, shortened; only the beginning of a long text is converted."""
    text = json.dumps(value[:60] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
