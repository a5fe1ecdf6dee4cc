"""The turns of an episode as the tokens of a chat, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torchrl_lang.data.chat_tokenizer import ChatTokenizer
from torchrl_lang.data.episodes import Episode, Turn
from torchrl_lang.data.tokenizers import encodes_to

__all__ = ["Part", "chat_parts", "read_chat_turns"]

Part = tuple[list[int], list[bool], float]
"""Tokens of one side, True on those of the agent, and a reward for the last of these."""


def chat_parts(episode: Episode, tokenizer: ChatTokenizer) -> list[Part]:
    """The parts of an episode in order: the opening, utterances with their ends, and what stands between them.

    Two utterances without a text of the environment between them have an empty message there.

    Raises:
        ValueError: the environment has two turns in a row, or a turn contains the end of an utterance.
    """
    turns, parts = list(episode.turns), []
    if not turns or turns[0].by_agent:
        parts.append(_of_environment(tokenizer.encode_opening("")))
    for index, turn in enumerate(turns):
        after = turns[index + 1] if index + 1 < len(turns) else None
        is_cut = episode.cut and after is None
        if not turn.by_agent:
            if after is not None and not after.by_agent:
                raise ValueError(f"Turns {index} and {index + 1} are both the environment's: join them for a chat.")
            parts.append(
                _of_environment(_environment_ids(turn, tokenizer, index, after is None and episode.terminated))
            )
            continue
        parts.append(_of_agent(turn, tokenizer, is_cut))
        if not is_cut and (after.by_agent if after else not episode.terminated):
            parts.append(_of_environment(tokenizer.encode_reply("")))
    return parts


def _of_environment(ids: list[int]) -> Part:
    return ids, [False] * len(ids), 0.0


def _environment_ids(turn: Turn, tokenizer: ChatTokenizer, index: int, ended: bool) -> list[int]:
    if turn.tokens is not None:
        return list(turn.tokens)
    return tokenizer.encode_reply(turn.text, answer=not ended) if index else tokenizer.encode_opening(turn.text)


def _of_agent(turn: Turn, tokenizer: ChatTokenizer, is_cut: bool) -> Part:
    ids = tokenizer.encode_action(turn.text) if turn.tokens is None else list(turn.tokens)
    control = tokenizer.control
    if control.end_of_action in ids or control.pad in ids:
        raise ValueError(f"The utterance {turn.text!r} contains its end token or the padding token.")
    agent = [True] * len(ids)
    if not is_cut:
        ids, agent = [*ids, control.end_of_action], [*agent, turn.closed]
    return ids, agent, turn.reward or 0.0


def read_chat_turns(
    tokens: list[int], agent: list[bool], reward: list[float], tokenizer: ChatTokenizer, terminated: bool
) -> tuple[list[Turn], bool]:
    """The turns of a row without its padding, and whether the end of the row cut the last one.

    Messages without text are no turns.

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
            ended = terminated and begin == stop
            turn, is_cut = _environment_turn(tokens[start:begin], tokenizer, not start, ended, begin == stop)
            if turn.text or turn.tokens is not None:
                turns.append(turn)
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


def _environment_turn(
    ids: Sequence[int], tokenizer: ChatTokenizer, is_opening: bool, ended: bool, is_last: bool
) -> tuple[Turn, bool]:
    """The environment's turn in a stretch of its tokens, and whether the stretch is incomplete."""
    row_format, written = tokenizer.row_format, tokenizer.decode(ids)
    before = row_format.opening if is_opening else row_format.between
    text = written.removeprefix(before)
    # A row may come without 'terminated': its last text has the other ending then.
    endings = [row_format.prompt, row_format.close] if is_last else [row_format.prompt]
    for after in reversed(endings) if ended else endings:
        if after and text.endswith(after):
            text = text.removesuffix(after)
            break
    encode = tokenizer.encode_opening if is_opening else lambda t: tokenizer.encode_reply(t, answer=not ended)
    canonical = encodes_to(encode, text, ids)
    is_cut = (
        is_last
        and not canonical
        and not ended
        and tuple(ids[-len(tokenizer.prompt_ids) :]) != tuple(tokenizer.prompt_ids)
    )
    return Turn(text, tokens=None if canonical else tuple(ids)), is_cut


def _agent_turn(ids: list[int], reward: float, closed: bool, tokenizer: ChatTokenizer) -> Turn:
    text = tokenizer.decode_action(ids)
    canonical = encodes_to(tokenizer.encode_action, text, ids)
    return Turn(text, reward, closed, None if canonical else tuple(ids))
