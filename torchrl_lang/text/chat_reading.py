"""Read the turns of an episode from the tokens of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from torchrl_lang.text.chat_tokenizer import ChatTokenizer
from torchrl_lang.text.episodes import ROLES, Turn
from torchrl_lang.text.row_format import RowFormat
from torchrl_lang.text.tokenizers import encodes_to

__all__ = ["read_chat_turns"]

Messages = list[tuple[str, str]]
"""Roles and texts."""

_READINGS = 64
"""Number of ways to read a stretch of the environment that are tried; texts that imitate the template have many."""


def read_chat_turns(
    tokens: list[int], agent: list[bool], reward: list[float], tokenizer: ChatTokenizer, terminated: bool
) -> tuple[list[Turn], bool]:
    """The turns of a row without its padding, and whether the end of the row cut the last one.

    A message of the user without text, alone between two utterances, is no turn.

    Raises:
        ValueError: the row begins with an utterance, or an utterance has no end.
    """
    if not tokens or agent[0]:
        raise ValueError("A row of a chat begins with the template's opening, but this one is empty or the agent's.")
    end, stop = tokenizer.control.end_of_action, len(tokens)
    turns: list[Turn] = []
    start, is_cut = 0, False
    while start < stop:
        begin = next((p for p in range(start, stop) if agent[p]), stop)
        if begin > start or not turns:
            ended = terminated and begin == stop and start > 0
            read, is_cut = _environment_turns(tokens[start:begin], tokenizer, not start, ended, begin == stop)
            turns += read
        if begin == stop:
            break
        after = next((p for p in range(begin, stop) if not agent[p]), stop)
        closed = tokens[after - 1] == end
        start = after if closed else after + 1
        is_cut = not closed and after == stop
        if not closed and after < stop and tokens[after] != end:
            raise ValueError(f"The utterance from position {begin} to {after} has no end token.")
        earned = sum(reward[begin:after])
        ids = tokens[begin : after - 1] if closed else tokens[begin:after]
        turns.append(_agent_turn(ids, earned, closed or is_cut, tokenizer))
        if start == stop and not is_cut and not terminated:  # there was no room for a reply
            turns, is_cut = [*turns, Turn("", tokens=())], True
    return turns, is_cut


def _environment_turns(
    ids: Sequence[int], tokenizer: ChatTokenizer, opening: bool, ended: bool, is_last: bool
) -> tuple[list[Turn], bool]:
    """The environment's turns in a stretch of its tokens, and whether the stretch is incomplete."""
    text = tokenizer.decode(ids)
    read = partial(_readings, text, "start" if opening else "assistant", row_format=tokenizer.row_format)
    encode = partial(tokenizer.encode_stretch, opening=opening, answer=not ended)
    for messages in islice(read(last="end" if ended else "assistant"), _READINGS):
        if encodes_to(encode, messages, ids):
            return ([] if messages == [("user", "")] else [Turn(text, role=role) for role, text in messages]), False
    # The tokens must be kept: a row may end within the text, or come without the entry 'terminated'.
    others = ("assistant", "end") if is_last else ("assistant",)
    found = (messages for last in others for messages in read(last=last) if len(messages) == 1)
    role, text = next(found, [("user", _without_header(text, tokenizer.row_format, opening))])[0]
    prompt = tuple(tokenizer.prompt_ids)
    is_cut = is_last and not ended and tuple(ids[-len(prompt) :]) != prompt
    return [Turn(text, tokens=tuple(ids), role=role)], is_cut


def _readings(text: str, first: str, *, last: str, row_format: RowFormat) -> Iterator[Messages]:
    """The ways in which a text may consist of messages with the template's strings around them, likely ones first.

    Args:
        text: all that stands between two places where the agent writes.
        first: "start" or "assistant", what stands before the text.
        last: "assistant" or "end", what follows it.
        row_format: has the strings.
    """
    joins = row_format.all_joins

    def begin(before: str, rest: str) -> Iterator[Messages]:
        """Readings of a rest that begins with the string between ``before`` and another role."""
        strings = {role: joins[f"{before}>{role}"] for role in ROLES if f"{before}>{role}" in joins}
        for role in sorted(strings, key=lambda role: len(strings[role]), reverse=True):
            if rest.startswith(strings[role]):
                yield from continue_from(role, rest.removeprefix(strings[role]))

    def continue_from(role: str, rest: str) -> Iterator[Messages]:
        """Readings of a rest that begins with the text of a message of ``role``."""
        inner = [joins[f"{role}>{other}"] for other in ROLES if joins.get(f"{role}>{other}")]
        places = sorted({place for string in inner for place in _places(string, rest)})
        for place in places:
            for more in begin(role, rest[place:]):
                yield [(role, rest[:place]), *more]
        tail = joins.get(f"{role}>{last}")
        if tail is not None and rest.endswith(tail):
            yield [(role, rest.removesuffix(tail))]

    return begin(first, text)


def _places(string: str, text: str) -> Iterator[int]:
    place = text.find(string)
    while place >= 0:
        yield place
        place = text.find(string, place + 1)


def _without_header(text: str, row_format: RowFormat, opening: bool) -> str:
    return text.removeprefix(row_format.opening if opening else row_format.between)


def _agent_turn(ids: list[int], reward: float, closed: bool, tokenizer: ChatTokenizer) -> Turn:
    text = tokenizer.decode_action(ids)
    canonical = encodes_to(tokenizer.encode_action, text, ids)
    return Turn(text, reward, closed, None if canonical else tuple(ids))
