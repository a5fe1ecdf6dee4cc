"""How an episode's turns become the tokens of one row, and how a row is cut that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_lang.data.episodes import LARGEST_REWARD, Episode, Turn
from torchrl_lang.data.tokenizers import Tokenizer
from torchrl_lang.schema import ACTION_MASK, ATTENTION_MASK, TERMINATED, TOKEN_REWARD, TOKENS, TRUNCATED, ControlTokens
from torchrl_lang.storage.errors import shorten

__all__ = ["EncodedEpisode", "TokenReward", "cut_episode", "fits", "encode_episode", "stack_episodes"]

TokenReward = Callable[[Sequence[int]], Sequence[float]]
"""Ids of a whole row to as many rewards, each for writing that token; those of the environment's tokens are ignored."""


class EncodedEpisode(NamedTuple):
    """The tokens of one episode, without padding."""

    tokens: list[int]
    agent: list[bool]
    """The agent wrote this token."""
    reward: list[float]
    terminated: bool
    truncated: bool


def encode_episode(episode: Episode, tokenizer: Tokenizer, token_reward: TokenReward | None = None) -> EncodedEpisode:
    """Tokens of an episode: an opening token, the turns, each with its closing token, and the end of the dialogue.

    A turn's reward sits on the turn's last token that the agent wrote.

    Raises:
        ValueError: a text cannot be encoded, or a turn has a reward but no token of the agent's to carry it.
    """
    control = tokenizer.control
    agent_first = not episode.turns or episode.turns[0].by_agent
    tokens, agent, reward = [control.begin_action if agent_first else control.begin_state], [False], [0.0]
    for index, turn in enumerate(episode.turns):
        ids = _encode(turn, tokenizer)
        written = [turn.by_agent] * len(ids)
        if not (episode.cut and index == len(episode.turns) - 1):
            ids = [*ids, control.end_of_action if turn.by_agent else control.end_of_state]
            written = [*written, turn.by_agent and turn.closed]
        earned = [0.0] * len(ids)
        if turn.reward:
            if True not in written:
                raise ValueError(f"Turn {index} earns {turn.reward} but holds no token of the agent's to carry it.")
            earned[len(written) - 1 - written[::-1].index(True)] = turn.reward
        tokens, agent, reward = tokens + ids, agent + written, reward + earned
    if episode.terminated and not episode.cut:
        tokens, agent, reward = [*tokens, control.end_of_dialogue], [*agent, False], [*reward, 0.0]
    if token_reward is not None:
        reward = _add(reward, token_reward(tokens), agent)
    return EncodedEpisode(tokens, agent, reward, episode.terminated, episode.truncated)


def _encode(turn: Turn, tokenizer: Tokenizer) -> list[int]:
    control = tokenizer.control
    if turn.tokens is None:
        ids, forbidden = tokenizer.encode(turn.text), control.ids()
    else:
        ids, forbidden = list(turn.tokens), _ends(turn, control)
    bad = set(ids).intersection(forbidden)
    if bad:
        raise ValueError(
            f"The turn {shorten(turn.text)} holds control tokens {sorted(bad)}, which would break the row apart."
        )
    return ids


def _ends(turn: Turn, control: ControlTokens) -> tuple[int, ...]:
    """What may not stand inside a turn, whatever the agent wrote: its end, and padding."""
    return (control.pad, control.end_of_action if turn.by_agent else control.end_of_state)


def _add(reward: list[float], extra: Sequence[float], agent: list[bool]) -> list[float]:
    if len(extra) != len(reward):
        raise ValueError(f"token_reward gave {len(extra)} rewards for a row of {len(reward)} tokens: give one a token.")
    total = [r + float(e) if mine else r for r, e, mine in zip(reward, extra, agent, strict=True)]
    for position, value in enumerate(total):
        if not abs(value) <= LARGEST_REWARD:
            raise ValueError(f"token_reward makes {value} of the reward at position {position}: it must be finite.")
    return total


def fits(encoded: EncodedEpisode, row_length: int) -> bool:
    """Whether a row holds the episode; the end of a truncated episode's dialogue may be left out."""
    spare = int(encoded.terminated and encoded.truncated)
    return len(encoded.tokens) - spare <= row_length


def cut_episode(encoded: EncodedEpisode, row_length: int) -> EncodedEpisode:
    """The head of an episode that does not fit, truncated and no longer terminated.

    The row ends on the last state that lies among its first ``row_length`` tokens (a state is a position from which the
    agent goes on writing). So an action is kept if and only if its successor state is, and with it its reward. A cut
    through the environment's words therefore leaves out these words and the action that they answer; a cut through the
    opening words keeps as many of them as fit.
    """
    if fits(encoded, row_length):
        return EncodedEpisode(
            encoded.tokens[:row_length], encoded.agent[:row_length], encoded.reward[:row_length], *encoded[3:]
        )
    states = [p for p in range(row_length) if encoded.agent[p + 1]]
    keep = states[-1] + 1 if states else row_length
    return EncodedEpisode(encoded.tokens[:keep], encoded.agent[:keep], encoded.reward[:keep], False, True)


def stack_episodes(episodes: Sequence[EncodedEpisode], pad: int, row_length: int) -> TensorDict:
    """Rows ``[N]`` of encoded episodes that fit, padded to ``row_length``."""
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
    arrays = {TOKENS: tokens, ATTENTION_MASK: attention, ACTION_MASK: agent, TOKEN_REWARD: reward}
    entries = {key: torch.from_numpy(array) for key, array in arrays.items()}
    return TensorDict({**entries, TERMINATED: ends[:, :1].clone(), TRUNCATED: ends[:, 1:].clone()}, batch_size=[n])
