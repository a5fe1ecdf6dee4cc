"""What a line of dialogues states, read independently of the library: from the documented format alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

ROLES = {"user": False, "environment": False, "assistant": True, "agent": True}
LARGEST = float(np.finfo(np.float32).max)


class Bad(Exception):
    """The line states no dialogue."""


@dataclass(frozen=True)
class Stated:
    """A dialogue: the text of its row with control tokens by name, and the reward of each of the agent's turns."""

    text: str
    turns: list[str]
    rewards: list[np.float32]
    terminated: bool
    truncated: bool

    def length(self, *, in_bytes: bool) -> int:
        """Tokens of the row, where each character or each byte of a text is one."""
        units = (len(text.encode()) if in_bytes else len(text) for text in self.turns)
        return 1 + sum(unit + 1 for unit in units) + self.terminated


def read_line(raw: bytes, alphabet: set[str] | None) -> Stated:
    """Read a line without its end; ``alphabet`` is ``None`` where all text can be encoded."""
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=partial(_require, False))
    except (ValueError, RecursionError) as error:
        raise Bad(str(error)) from None
    _require(type(content) is dict and set(content) <= {"turns", "reward", "terminated", "truncated"}, "keys")
    turns = content.get("turns")
    _require(type(turns) is list and len(turns) > 0, "turns")
    read = [_turn(turn, alphabet) for turn in turns]
    rewards = [reward for by_agent, _, reward in read if by_agent]
    extra = _number(content.get("reward", 0))
    if extra:
        _require(bool(rewards), "a reward and no turn of the agent's")
        rewards[-1] += extra
        _require(abs(rewards[-1]) <= LARGEST, "too large")
    truncated = _flag(content.get("truncated", False))
    terminated = _flag(content.get("terminated", not truncated))
    text = "<a>" if read[0][0] else "<s>"
    text += "".join(words + ("</a>" if by_agent else "</s>") for by_agent, words, _ in read)
    texts = [words for _, words, _ in read]
    return Stated(text + "</eod>" * terminated, texts, [np.float32(r) for r in rewards], terminated, truncated)


def _turn(turn: Any, alphabet: set[str] | None) -> tuple[bool, str, float]:
    _require(type(turn) is dict and set(turn) <= {"role", "text", "reward"}, "keys of a turn")
    role, text = turn.get("role"), turn.get("text")
    _require(type(role) is str and role in ROLES, "role")
    _require(type(text) is str, "text")
    _require(alphabet is None or set(text) <= alphabet, "characters")
    _require(not any(0xD800 <= ord(character) < 0xE000 for character in text), "half a surrogate pair")
    _require(ROLES[role] or "reward" not in turn, "a reward of the environment's")
    return ROLES[role], text, _number(turn.get("reward", 0))


def _number(value: Any) -> float:
    _require(type(value) in (int, float), "a number")
    _require(abs(value) <= LARGEST and math.isfinite(value), "a finite number")
    return float(value)


def _flag(value: Any) -> bool:
    _require(type(value) is bool, "a flag")
    return bool(value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require(len(dict(pairs)) == len(pairs), "a key twice")
    return dict(pairs)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Bad(what)
