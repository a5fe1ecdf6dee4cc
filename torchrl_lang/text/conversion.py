"""Lossless conversion of episodes to rows and back."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal

from tensordict import TensorDict, TensorDictBase

from torchrl_lang._checks import at_least_one, one_of
from torchrl_lang.schema import ROW_KEYS, TERMINATED, TRUNCATED, check_row, missing_entry
from torchrl_lang.text.chat_reading import read_chat_turns
from torchrl_lang.text.chat_tokenizer import ChatTokenizer, encode_action
from torchrl_lang.text.encoded_episode import TokenReward, cut_episode, encode_episode, overflow, stack_episodes
from torchrl_lang.text.episodes import Episode, Turn
from torchrl_lang.text.tokenizers import Tokenizer, encodes_to

__all__ = ["from_row", "to_row", "to_rows"]


def to_rows(
    episodes: Sequence[Episode],
    tokenizer: Tokenizer,
    row_length: int,
    *,
    token_reward: TokenReward | None = None,
    on_overflow: Literal["error", "truncate"] = "error",
) -> TensorDict:
    """Encode episodes as rows ``[N]`` of ``row_length`` tokens, with ``terminated`` and ``truncated`` ``[N, 1]``.

    A row begins with ``<s>`` if the environment takes the first turn and with ``<a>`` if the agent does. ``</s>`` ends
    a turn of the environment, ``</a>`` a turn of the agent, ``</eod>`` an episode that has terminated. With a
    :class:`~torchrl_lang.text.ChatTokenizer` a row is written as its chat template writes a dialogue.

    Args:
        episodes: the episodes to encode.
        tokenizer: encodes each turn separately, so that no token spans two turns.
        row_length: ``T``.
        token_reward: rewards for single tokens, ids ``[L] -> [L]``, added to the rewards of the turns.
        on_overflow: "error" rejects an episode that does not fit. "truncate" keeps its beginning, marks it truncated
            instead of terminated, and warns. An action is dropped with its reward if its successor state does not fit;
            so if the cut is inside a turn of the environment, that turn and the action before it are dropped.

    Raises:
        ValueError: an episode does not fit or cannot be encoded, or a reward is not finite.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abcdefghijklmnopqrstuvwxyz ")
        >>> episode = Episode([Turn("hi"), Turn("yo", reward=1.0)], terminated=True)
        >>> rows = to_rows([episode], tokenizer, row_length=10)
        >>> tokenizer.decode(rows["tokens"][0])
        '<s>hi</s>yo</a></eod><|pad|><|pad|>'
        >>> rows["token_reward"][0].tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    """
    at_least_one("row_length", row_length)
    one_of("on_overflow", on_overflow, ("error", "truncate"))
    encoded = [encode_episode(episode, tokenizer, token_reward) for episode in episodes]
    what, longest = overflow(encoded, row_length, "episodes")
    if what:
        if on_overflow == "error":
            raise ValueError(f"{what}: give a row_length of {longest} or on_overflow='truncate'.")
        warnings.warn(f"{what}: they were truncated.", stacklevel=2)
    rows = stack_episodes([cut_episode(layout, row_length) for layout in encoded], tokenizer.control.pad, row_length)
    check_row(rows, vocab_size=tokenizer.vocab_size)
    return rows


def to_row(
    episode: Episode,
    tokenizer: Tokenizer,
    row_length: int,
    *,
    token_reward: TokenReward | None = None,
    on_overflow: Literal["error", "truncate"] = "error",
) -> TensorDict:
    """Encode one episode as a row of ``row_length`` tokens, batch size ``[]``; see :func:`to_rows`."""
    return to_rows([episode], tokenizer, row_length, token_reward=token_reward, on_overflow=on_overflow)[0]


def from_row(row: TensorDictBase, tokenizer: Tokenizer) -> Episode:
    """Decode a row, batch size ``[]``, to an episode; :func:`to_row` encodes it to the same row again.

    This holds for every row that a :class:`~torchrl_lang.envs.LanguageEnv` or :func:`to_row` makes. The reward of a
    turn is the sum over its tokens; rewards of single tokens are not preserved.

    Raises:
        ValueError: the row is malformed: it has the wrong opening token, a turn of the agent has no end token, or the
            row has an end-of-dialogue token although the episode has not terminated.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, from_row, to_row
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> episode = Episode([Turn("ab", reward=1.0), Turn("c")], terminated=True)
        >>> from_row(to_row(episode, tokenizer, 12), tokenizer) == episode
        True
    """
    check_row(row, vocab_size=tokenizer.vocab_size)
    tokens, attention, agent, reward = (row.get(key).tolist() for key in ROW_KEYS)
    length = sum(attention)
    real = tokens[:length], agent[:length], reward[:length]
    if isinstance(tokenizer, ChatTokenizer):
        terminated, truncated = (_flag(row, key, None) for key in (TERMINATED, TRUNCATED))
        turns, cut = read_chat_turns(*real, tokenizer, terminated)
    else:
        turns, cut, ended = _read_control_turns(*real, tokenizer)
        terminated, truncated = (_flag(row, key, default) for key, default in ((TERMINATED, ended), (TRUNCATED, False)))
        if ended and not terminated:
            raise ValueError(
                "The row ends with the end-of-dialogue token but 'terminated' is False: correct one of them."
            )
    return Episode(turns, terminated, truncated or cut, cut)


def _read_control_turns(
    tokens: list[int], agent: list[bool], reward: list[float], tokenizer: Tokenizer
) -> tuple[list[Turn], bool, bool]:
    """The turns of a row, whether the end token of the last is missing, and whether the dialogue has ended."""
    control, length = tokenizer.control, len(tokens)
    if length == 0 or tokens[0] not in (control.begin_state, control.begin_action):
        opening = tokenizer.decode(tokens[:1]) if length else "nothing"
        raise ValueError(f"A row must begin with a begin-of-state or begin-of-action token, got {opening!r}.")
    ended = tokens[length - 1] == control.end_of_dialogue and not agent[length - 1]
    stop = length - ended
    turns, cut = _read_turns(tokens[:stop], agent[:stop], reward[:stop], tokenizer)
    agent_first = tokens[0] == control.begin_action
    if not turns and not agent_first:  # truncated at the start of the environment's first turn
        turns, cut = [Turn("")], True
    if turns and turns[0].by_agent != agent_first:
        first = "the agent has the" if agent_first else "the environment has the"
        raise ValueError(f"The row's opening token means that {first} first turn, but the other side has it.")
    return turns, cut, ended


def _read_turns(
    tokens: list[int], agent: list[bool], reward: list[float], tokenizer: Tokenizer
) -> tuple[list[Turn], bool]:
    """The turns after the opening token, and whether the end token of the last turn is missing."""
    control, stop = tokenizer.control, len(tokens)
    turns, start, cut = [], 1, False
    while start < stop:
        by_agent = agent[start] or tokens[start] == control.end_of_action
        mark = control.end_of_action if by_agent else control.end_of_state
        end = next((p for p in range(start, stop) if tokens[p] == mark), stop)
        cut = end == stop
        # The end token of an agent's turn is written by the agent or by the environment.
        if any(agent[p] != by_agent for p in range(start, end if by_agent else min(end + 1, stop))):
            raise ValueError(
                f"The turn from position {start} to {end} has tokens of both sides: its end token is missing."
            )
        closed = not by_agent or (not cut and agent[end])
        earned = sum(reward[start : end + 1]) if by_agent else None
        turns.append(_turn(tokens[start:end], earned, closed, tokenizer))
        start = end + 1
    return turns, cut


def _flag(row: TensorDictBase, key: str, default: bool | None) -> bool:
    value = row.get(key, None)
    if value is None and default is None:
        raise missing_entry("A row of a chat", [key], row, "No token of a chat shows how its episode ended.")
    return bool(default) if value is None else bool(value.any())


def _turn(ids: list[int], reward: float | None, closed: bool, tokenizer: Tokenizer) -> Turn:
    text = tokenizer.decode(ids)
    canonical = encodes_to(tokenizer.encode if reward is None else partial(encode_action, tokenizer), text, ids)
    return Turn(text, reward, closed, None if canonical else tuple(ids))
