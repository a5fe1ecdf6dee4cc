"""Lossless conversion of episodes to rows and back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_lang import schema
from torchrl_lang._checks import Count, checked
from torchrl_lang._files import shorten
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, ROW_KEYS, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED
from torchrl_lang.text.chat_template import RowFormat
from torchrl_lang.text.chat_tokenizer import ChatTokenizer, decode_action, encode_action
from torchrl_lang.text.episodes import ROLES, Episode, Turn
from torchrl_lang.text.tokenizers import Tokenizer, encodes_to


@checked
def to_rows(
    episodes: Sequence[Episode],
    tokenizer: Tokenizer,
    row_length: Count,
    *,
    token_reward: TokenReward | None = None,
    on_overflow: Literal["error", "truncate"] = "error",
) -> TensorDict:
    """Encode episodes as rows ``[N]`` of ``row_length`` tokens, with ``terminated`` and ``truncated`` ``[N, 1]``.

    A row begins with ``<s>`` if the environment takes the first turn and with ``<a>`` if the agent does. ``</s>`` ends
    a turn of the environment, ``</a>`` a turn of the agent, ``</eod>`` an episode that has terminated. With a
    :class:`~torchrl_lang.text.ChatTokenizer` a row is written as its chat template writes a dialogue; where it changes
    earlier messages, each utterance has a row of its own, see :func:`~torchrl_lang.text.rows.parts_of`.

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
    parts = [part for episode in episodes for part in parts_of(episode, tokenizer)]
    encoded = [encode_episode(part, tokenizer, token_reward) for part in parts]
    what, longest = overflow(encoded, row_length, "episodes")
    if what:
        if on_overflow == "error":
            raise ValueError(f"{what}: give a row_length of {longest} or on_overflow='truncate'.")
        warnings.warn(f"{what}: they were truncated.", stacklevel=3)
    rows = stack_episodes([cut_episode(layout, row_length) for layout in encoded], tokenizer.control.pad, row_length)
    schema.check_row(rows, vocab_size=tokenizer.vocab_size)
    return rows


def from_row(row: TensorDictBase, tokenizer: Tokenizer) -> Episode:
    """Decode a row, batch size ``[]``, to an episode; :func:`to_rows` encodes it to the same row again.

    This holds for every row that a :class:`~torchrl_lang.envs.LanguageEnv` or :func:`to_rows` makes. The reward of a
    turn is the sum over its tokens; rewards of single tokens are not preserved.

    Raises:
        ValueError: the row is malformed: it has the wrong opening token, a turn of the agent has no end token, or the
            row has an end-of-dialogue token although the episode has not terminated.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, from_row, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> episode = Episode([Turn("ab", reward=1.0), Turn("c")], terminated=True)
        >>> from_row(to_rows([episode], tokenizer, 12)[0], tokenizer) == episode
        True
    """
    schema.check_row(row, vocab_size=tokenizer.vocab_size)
    tokens, attention, agent, reward = (row.get(key).tolist() for key in ROW_KEYS)
    length = sum(attention)
    real = tokens[:length], agent[:length], reward[:length]
    if isinstance(tokenizer, ChatTokenizer):
        terminated, truncated = (_flag(row, key, None) for key in (TERMINATED, TRUNCATED))
        turns, cut = read_chat_turns(*real, tokenizer, terminated)
    else:
        turns, cut, ended = read_control_turns(*real, tokenizer)
        terminated, truncated = (_flag(row, key, default) for key, default in ((TERMINATED, ended), (TRUNCATED, False)))
        if ended and not terminated:
            raise ValueError("The row ends with the end-of-dialogue token but 'terminated' is False: correct one.")
    return Episode(turns, terminated, truncated or cut, cut)


def read_control_turns(
    tokens: list[int], agent: list[bool], reward: list[float], tokenizer: Tokenizer
) -> tuple[list[Turn], bool, bool]:
    """The turns of a row, whether the end token of the last is missing, and whether the dialogue has ended."""
    control = tokenizer.control
    if not tokens or tokens[0] not in (control.begin_state, control.begin_action):
        opening = tokenizer.decode(tokens[:1]) or "nothing"
        raise ValueError(f"A row must begin with a begin-of-state or begin-of-action token, got {opening!r}.")
    ended = tokens[-1] == control.end_of_dialogue and not agent[-1]
    agent_first, stop = tokens[0] == control.begin_action, len(tokens) - ended
    turns, start, cut = [], 1, False
    while start < stop:
        # After a begin-of-state token it is the environment's: a row that continues a game repeats it.
        is_end = tokens[start] == control.end_of_action and (start > 1 or agent_first)
        by_agent = agent[start] or is_end
        mark = control.end_of_action if by_agent else control.end_of_state
        end = next((p for p in range(start, stop) if tokens[p] == mark), stop)
        cut = end == stop
        # The end token of an agent's turn is written by the agent or by the environment.
        if any(agent[p] != by_agent for p in range(start, end if by_agent else min(end + 1, stop))):
            raise ValueError(f"The turn from {start} to {end} has tokens of both sides: it lacks its end token.")
        closed = not by_agent or (not cut and agent[end])
        earned = sum(reward[start : end + 1]) if by_agent else None
        turns.append(_turn(tokens[start:end], earned, closed, tokenizer))
        start = end + 1
    if not turns and not agent_first:  # truncated at the start of the environment's first turn
        return [Turn("")], True, ended
    if turns and turns[0].by_agent != agent_first:
        first = "the agent" if agent_first else "the environment"
        raise ValueError(f"The row's opening token means that {first} has the first turn, but the other side has it.")
    return turns, cut, ended


def _flag(row: TensorDictBase, key: str, default: bool | None) -> bool:
    value = row.get(key, None)
    if value is None and default is None:
        raise schema.missing_entry("A row of a chat", [key], row, "No token of a chat shows how its episode ended.")
    return bool(default) if value is None else bool(value.any())


def _turn(ids: list[int], reward: float | None, closed: bool, tokenizer: Tokenizer) -> Turn:
    by_agent = reward is not None
    text = decode_action(tokenizer, ids) if by_agent else tokenizer.decode(ids)
    canonical = encodes_to(partial(encode_action, tokenizer) if by_agent else tokenizer.encode, text, ids)
    return Turn(text, reward, closed, None if canonical else tuple(ids))


TokenReward = Callable[[Sequence[int]], Sequence[float]]
"""Maps the ids of a row to one reward per token for writing it; rewards of the environment's tokens are ignored."""


def parts_of(episode: Episode, tokenizer: Tokenizer) -> list[Episode]:
    """The episodes of the rows of an episode: itself, or one for each utterance where earlier messages are rewritten.

    A chat template that drops the thoughts of earlier turns, for instance, writes another text before each utterance,
    and a row is one text (:attr:`RowFormat.rewrites <torchrl_lang.text.RowFormat.rewrites>`). So each utterance gets a
    row: all that the agent has read when it writes, as the environment's, and the utterance. Its reward is the sum of
    the rewards from there to the end, undiscounted, and the row has terminated: no loss bootstraps from the row of
    another utterance, so values across utterances are those of the data, as in Monte Carlo. The last row ends as the
    episode does.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn
        >>> from torchrl_lang.text.rows import parts_of
        >>> episode = Episode([Turn("a"), Turn("b", 1.0)], terminated=True)
        >>> parts_of(episode, CharTokenizer.from_alphabet("ab")) == [episode]
        True
    """
    mine = [index for index, turn in enumerate(episode.turns) if turn.by_agent]
    if not (isinstance(tokenizer, ChatTokenizer) and tokenizer.row_format.rewrites and mine):
        return [episode]
    turns, parts = episode.turns, []
    for index in mine:
        is_last = index == mine[-1]
        exact = next((turn.tokens for turn in turns[: mine[0]] if turn.tokens is not None), None)
        ids = exact if index == mine[0] and exact else tokenizer.encode_prompt(plain_messages(turns[:index]))
        to_go = sum(turn.reward or 0.0 for turn in turns[index:])
        own = [Turn("", tokens=tuple(ids)), replace(turns[index], reward=to_go)]
        if is_last:
            parts.append(replace(episode, turns=[*own, *turns[index + 1 :]]))
        else:
            parts.append(Episode(own, terminated=True))
    return parts


def plain_messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Turns as messages before an utterance, with an empty one of the user where utterances follow each other."""
    messages: list[dict[str, str]] = []
    for turn in turns:
        if turn.by_agent and (not messages or messages[-1]["role"] == "assistant"):
            messages.append({"role": "user", "content": ""})
        messages.append({"role": "assistant" if turn.by_agent else turn.role, "content": turn.text})
    if not messages or messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": ""})
    return messages


class EncodedEpisode(NamedTuple):
    """The tokens of one episode, without padding."""

    tokens: list[int]
    agent: list[bool]
    """True on the agent's tokens."""
    reward: list[float]
    terminated: bool
    truncated: bool


def encode_episode(episode: Episode, tokenizer: Tokenizer, token_reward: TokenReward | None = None) -> EncodedEpisode:
    """Encode an episode: its opening, the turns with their ends, and the end of the dialogue.

    The reward of a turn is placed on the last token that the agent wrote in it.

    Raises:
        ValueError: a text cannot be encoded, or a turn has a reward but no token of the agent.
    """
    tokens: list[int] = []
    agent: list[bool] = []
    reward: list[float] = []
    for_chat = isinstance(tokenizer, ChatTokenizer)
    parts = chat_parts(episode, tokenizer) if for_chat else _control_parts(episode, tokenizer)  # type: ignore[arg-type]
    for ids, written, earned in parts:
        tokens += ids
        agent += written
        reward += [0.0] * len(ids)
        if earned:
            if True not in written:
                raise ValueError(f"A turn has the reward {earned} but no token of the agent to place it on.")
            reward[-1 - written[::-1].index(True)] = earned
    if token_reward is not None:
        more = token_reward(tokens)
        if len(more) != len(tokens):
            raise ValueError(f"token_reward returned {len(more)} rewards for {len(tokens)} tokens: give one for each.")
        reward = [r + float(m) if own else r for r, m, own in zip(reward, more, agent, strict=True)]
    return EncodedEpisode(tokens, agent, reward, episode.terminated, episode.truncated)


def _control_parts(episode: Episode, tokenizer: Tokenizer) -> list[Part]:
    """The opening token, the turns with their end tokens, and the end of the dialogue."""
    control = tokenizer.control
    if roles := sorted({turn.role for turn in episode.turns} - {"user"}):
        raise ValueError(f"Control tokens mark no messages of the roles {roles}: use a ChatTokenizer (--chat).")
    agent_first = not episode.turns or episode.turns[0].by_agent
    parts: list[Part] = [([control.begin_action if agent_first else control.begin_state], [False], 0.0)]
    for index, turn in enumerate(episode.turns):
        ids = _encode(turn, tokenizer)
        written = [turn.by_agent] * len(ids)
        if not (episode.cut and index == len(episode.turns) - 1):
            ids = [*ids, control.end_of_action if turn.by_agent else control.end_of_state]
            written = [*written, turn.by_agent and turn.closed]
        parts.append((ids, written, turn.reward or 0.0))
    if episode.terminated and not episode.cut:
        parts.append(([control.end_of_dialogue], [False], 0.0))
    return parts


def _encode(turn: Turn, tokenizer: Tokenizer) -> list[int]:
    """Ids of a turn without its end."""
    control = tokenizer.control
    if turn.tokens is None:
        ids = encode_action(tokenizer, turn.text) if turn.by_agent else tokenizer.encode(turn.text)
        forbidden: Sequence[int] = control.ids()
    else:
        end = control.end_of_action if turn.by_agent else control.end_of_state
        ids, forbidden = list(turn.tokens), (control.pad, end)  # other control tokens may be what a model wrote
    if bad := sorted(set(ids).intersection(forbidden)):
        raise ValueError(f"The control tokens {bad} are not allowed in a turn, {shorten(turn.text)} contains them.")
    return ids


def fits(encoded: EncodedEpisode, row_length: int) -> bool:
    """Whether the episode fits a row; the end-of-dialogue token of a truncated episode may be left out."""
    spare = int(encoded.terminated and encoded.truncated)
    return len(encoded.tokens) - spare <= row_length


def overflow(encoded: Sequence[EncodedEpisode], row_length: int, name: str) -> tuple[str, int]:
    """A sentence about the episodes, called by ``name``, that do not fit, empty if all do; and the longest length."""
    over = [index for index, layout in enumerate(encoded) if not fits(layout, row_length)]
    if not over:
        return "", row_length
    longest = max(len(encoded[index].tokens) for index in over)
    what = f"{len(over)} of {len(encoded)} {name} (the first is {over[0]}) are longer than "
    return what + f"row_length={row_length} tokens, the longest has {longest}", longest


def cut_episode(encoded: EncodedEpisode, row_length: int) -> EncodedEpisode:
    """Truncate an episode that does not fit; the result is marked truncated and not terminated.

    The row ends at the last state among its first ``row_length`` tokens, where a state is a position at which the agent
    writes the next token. So an action is kept, with its reward, if and only if its successor state is kept. If the cut
    is inside a turn of the environment, that turn and the action before it are dropped; if it is inside the
    environment's opening turn, as many of its tokens as fit are kept.
    """
    keep, ends = row_length, (encoded.terminated, encoded.truncated)
    if not fits(encoded, row_length):
        states = [p for p in range(row_length) if encoded.agent[p + 1]]
        keep, ends = states[-1] + 1 if states else row_length, (False, True)
    return EncodedEpisode(encoded.tokens[:keep], encoded.agent[:keep], encoded.reward[:keep], *ends)


def stack_episodes(episodes: Sequence[EncodedEpisode], pad: int, row_length: int) -> TensorDict:
    """Stack encoded episodes that fit into rows ``[N]``, padded to ``row_length``."""
    n = len(episodes)
    tokens = np.full((n, row_length), pad, dtype=np.int64)
    attention, agent = (np.zeros((n, row_length), dtype=np.bool_) for _ in range(2))
    reward = np.zeros((n, row_length), dtype=np.float32)
    for row, encoded in enumerate(episodes):
        length = len(encoded.tokens)
        tokens[row, :length] = encoded.tokens
        attention[row, :length] = True
        agent[row, :length] = encoded.agent
        reward[row, :length] = encoded.reward
    ends = torch.tensor([[each.terminated, each.truncated] for each in episodes], dtype=torch.bool).reshape(n, 2)
    arrays = {TOKENS: tokens, ATTENTION_MASK: attention, AGENT_MASK: agent, TOKEN_REWARD: reward}
    entries = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return TensorDict({**entries, TERMINATED: ends[:, :1].clone(), TRUNCATED: ends[:, 1:].clone()}, batch_size=[n])


Part = tuple[list[int], list[bool], float]
"""Tokens of one side, True on those of the agent, and a reward for the last of these."""


def chat_parts(episode: Episode, tokenizer: ChatTokenizer) -> list[Part]:
    """The parts of an episode in order: the opening, utterances with their ends, and what stands between them.

    Two utterances without a turn of the environment between them have an empty message of the user there.

    Raises:
        ValueError: the chat template has no such sequence of roles, or an utterance contains its end.
    """
    parts: list[Part] = []
    waiting: list[Turn] = []
    for index, turn in enumerate(episode.turns):
        if not turn.by_agent:
            waiting.append(turn)
            continue
        is_cut = episode.cut and index == len(episode.turns) - 1
        parts.append(_of_environment(waiting, tokenizer, opening=not parts))
        parts.append(_of_agent(turn, tokenizer, is_cut))
        waiting = []
        if is_cut:
            return parts
    answer = not parts or not episode.terminated
    return [*parts, _of_environment(waiting, tokenizer, opening=not parts, answer=answer)]


def _of_environment(turns: Sequence[Turn], tokenizer: ChatTokenizer, *, opening: bool, answer: bool = True) -> Part:
    """All that stands before the first utterance, between two, or after the last one."""
    exact = [turn.tokens for turn in turns if turn.tokens is not None]
    if exact and len(turns) > 1:
        raise ValueError(f"{len(turns)} turns of the environment follow each other: give their texts without tokens.")
    messages = [(turn.role, turn.text) for turn in turns] or [("user", "")]
    is_silent = not answer and messages == [("user", "")]
    if exact or is_silent:
        ids = list(exact[0]) if exact else []
    else:
        ids = tokenizer.encode_stretch(messages, opening=opening, answer=answer)
    return ids, [False] * len(ids), 0.0


def _of_agent(turn: Turn, tokenizer: ChatTokenizer, is_cut: bool) -> Part:
    ids = _encode(turn, tokenizer)
    agent = [True] * len(ids)
    if not is_cut:
        ids, agent = [*ids, tokenizer.control.end_of_action], [*agent, turn.closed]
    return ids, agent, turn.reward or 0.0


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
        turns.append(_turn(ids, earned, closed or is_cut, tokenizer))
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
    header = tokenizer.row_format.opening if opening else tokenizer.row_format.between
    role, text = next(found, [("user", text.removeprefix(header))])[0]
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
    return (match.start() for match in re.finditer(f"(?={re.escape(string)})", text))
