"""Encode the turns of an episode as the tokens of a row, and truncate episodes that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_lang._files import shorten
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED
from torchrl_lang.text.chat_rows import Part, chat_parts
from torchrl_lang.text.chat_tokenizer import ChatTokenizer, encode_action
from torchrl_lang.text.episodes import LARGEST_REWARD, Episode, Turn
from torchrl_lang.text.tokenizers import Tokenizer

__all__ = ["EncodedEpisode", "TokenReward", "cut_episode", "encode_episode", "fits", "overflow", "stack_episodes"]

TokenReward = Callable[[Sequence[int]], Sequence[float]]
"""Maps the ids of a row to one reward per token for writing it; rewards of the environment's tokens are ignored."""


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
    if isinstance(tokenizer, ChatTokenizer):
        parts = chat_parts(episode, tokenizer)
    else:
        parts = _control_parts(episode, tokenizer)
    for ids, written, earned in parts:
        paid = [0.0] * len(ids)
        if earned:
            if True not in written:
                raise ValueError(f"A turn has the reward {earned} but no token of the agent to place it on.")
            paid[len(written) - 1 - written[::-1].index(True)] = earned
        tokens, agent, reward = tokens + ids, agent + written, reward + paid
    if token_reward is not None:
        reward = _add(reward, token_reward(tokens), agent)
    return EncodedEpisode(tokens, agent, reward, episode.terminated, episode.truncated)


def _control_parts(episode: Episode, tokenizer: Tokenizer) -> list[Part]:
    """The opening token, the turns with their end tokens, and the end of the dialogue."""
    control = tokenizer.control
    roles = sorted({turn.role for turn in episode.turns} - {"user"})
    if roles:
        raise ValueError(
            f"Rows with control tokens have no messages of the roles {', '.join(roles)}: use a ChatTokenizer, or turns "
            f"with the role 'user'."
        )
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
    control = tokenizer.control
    if turn.tokens is None:
        ids = encode_action(tokenizer, turn.text) if turn.by_agent else tokenizer.encode(turn.text)
        forbidden = control.ids()
    else:
        end = control.end_of_action if turn.by_agent else control.end_of_state
        ids, forbidden = list(turn.tokens), (control.pad, end)  # other control tokens may be what a model wrote
    bad = set(ids).intersection(forbidden)
    if bad:
        raise ValueError(
            f"The turn {shorten(turn.text)} contains the control tokens {sorted(bad)}, which are not allowed in a turn."
        )
    return ids


def _add(reward: list[float], extra: Sequence[float], agent: list[bool]) -> list[float]:
    if len(extra) != len(reward):
        raise ValueError(f"token_reward returned {len(extra)} rewards for {len(reward)} tokens: return one per token.")
    total = [r + float(e) if mine else r for r, e, mine in zip(reward, extra, agent, strict=True)]
    for position, value in enumerate(total):
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"token_reward makes the reward at position {position} {value}: it must be finite.")
    return total


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
