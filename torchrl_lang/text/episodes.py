"""Episodes as text: the turns of both sides and their rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, FiniteFloat, Strict, TypeAdapter, ValidationError
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Finite, check_options, checked
from torchrl_lang._files import file_errors, read_json, shorten, write_json
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKEN_REWARD, TOKENS, entry

ROLES = ("user", "tool", "system")
"""Roles of the messages that the environment writes in a chat."""

LARGEST_REWARD: float = torch.finfo(torch.float32).max
"""The largest reward, because rows store float32."""


@dataclass(frozen=True)
class Turn:
    """One turn of the agent or the environment.

    Args:
        text: plain text; names of control tokens in it are not special.
        reward: the reward of the agent's turn; None for a turn of the environment.
        closed: False if the agent did not write the end token of its turn and the environment added it.
        tokens: the exact ids, if encoding ``text`` would give others (a model may generate a word in unusual pieces, or
            control tokens).
        role: of a message that the environment writes in a chat: "user", "tool", or "system" for the first one.

    Raises:
        ValueError: the reward is not a finite number, a turn of the environment has ``closed=False``, a turn of the
            agent has a role, or there is no such role.

    Examples:
        >>> from torchrl_lang.text import Turn
        >>> Turn("is it red?", reward=-1.0)
        Turn(text='is it red?', reward=-1.0, closed=True, tokens=None, role='user')
    """

    text: str
    reward: float | None = None
    closed: bool = True
    tokens: tuple[int, ...] | None = None
    role: str = "user"

    def __post_init__(self) -> None:
        if self.reward is not None and not abs(self.reward) <= LARGEST_REWARD:
            raise ValueError(f"A turn's reward must be a finite float32, got {self.reward} for {shorten(self.text)}.")
        if self.reward is None and not self.closed:
            raise ValueError(f"closed=False is for turns of the agent; {shorten(self.text)} has no reward.")
        check_options(role=(self.role, ROLES if self.reward is None else ("user",)))

    @property
    def by_agent(self) -> bool:
        """Whether the agent wrote this turn."""
        return self.reward is not None


@dataclass(frozen=True)
class Episode:
    """The turns of an episode and how it ended.

    Args:
        turns: may be empty; a side may take several turns in a row.
        terminated: the task ended.
        truncated: a limit (of turns or of the row) ended the episode.
        cut: the end of the row cut the last turn, which has no end token. Only with ``truncated``.

    Examples:
        >>> from torchrl_lang.text import Episode, Turn
        >>> episode = Episode([Turn("a dog"), Turn("is it red?", -1.0), Turn("no")], terminated=True)
        >>> episode.total_reward
        -1.0
    """

    turns: Sequence[Turn]
    terminated: bool
    truncated: bool = False
    cut: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "turns", tuple(self.turns))
        if self.cut and not (self.truncated and self.turns):
            raise ValueError("cut=True means that the last turn did not fit: it needs turns and truncated=True.")

    @property
    def total_reward(self) -> float:
        """Sum of the rewards of all turns."""
        return sum((turn.reward for turn in self.turns if turn.reward is not None), 0.0)


_TABLE = TypeAdapter(dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]*)$")], Annotated[FiniteFloat, Strict()]])
_REMEDY = 'give a JSON object of numbers by token id, such as {"17": 0.25}'


class TokenRewardTable:
    """A reward for writing each token: ``table[token] * scale + shift``.

    Tokens that are not in the table have the value 0 in it, so their reward is ``shift``. It is a ``token_reward`` of
    :func:`~torchrl_lang.text.to_rows` and of the readers of dialogues, and :meth:`add_to` adds it to existing rows. The
    reward is added to that of the turn, on every token of the agent, its end-of-action token included. The ILQL paper's
    code has the same tables (arXiv 2206.11871).

    Args:
        table: values by token id.
        scale: factor of the values.
        shift: added to every scaled value.

    Raises:
        ValueError: a number is not finite, or an id is negative.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, TokenRewardTable, Turn, to_rows
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> table = TokenRewardTable({0: 0.5, 1: 0.25}, scale=4.0, shift=-1.0)
        >>> episode = Episode([Turn("ab", reward=10.0)], terminated=True)
        >>> to_rows([episode], tokenizer, 5, token_reward=table)["token_reward"]  # a, b, and the end of the action
        tensor([[0., 1., 0., 9., 0.]])
    """

    @checked
    def __init__(self, table: Mapping[int, float], *, scale: Finite = 1.0, shift: Finite = 0.0) -> None:
        if bad := [(token, value) for token, value in table.items() if token < 0 or not math.isfinite(value)]:
            raise ValueError(f"A table of token rewards has finite numbers for ids from 0, got {bad[0]}.")
        self.table, self.scale, self.shift = dict(table), scale, shift
        values = torch.zeros(1 + max(self.table, default=0), dtype=torch.float64)
        for token, value in self.table.items():
            values[token] = value
        self._values = values * scale + shift

    @classmethod
    def read(cls, path: str | Path, *, scale: float = 1.0, shift: float = 0.0) -> TokenRewardTable:
        """Read a JSON file of values by token id, as :meth:`write` and the ILQL paper's code write it.

        Raises:
            FileError: the file cannot be read, or holds something else.
        """
        path = Path(path)
        with file_errors(path, "", _REMEDY, ValidationError):
            table = _TABLE.validate_json(json.dumps(read_json(path, remedy=_REMEDY)))
        return cls({int(token): value for token, value in table.items()}, scale=scale, shift=shift)

    def write(self, path: str | Path) -> None:
        """Write the table, without scale and shift, as JSON."""
        write_json(Path(path), {str(token): value for token, value in self.table.items()})

    def __call__(self, tokens: Sequence[int]) -> list[float]:
        """One reward per token of a row."""
        return self.rewards(torch.as_tensor(tokens, dtype=torch.int64)).tolist()

    def rewards(self, tokens: Tensor) -> Tensor:
        """The reward of each token, int ``[...]`` to float64 ``[...]``."""
        inside = (tokens >= 0) & (tokens < len(self._values))
        values = self._values.to(tokens.device)[torch.where(inside, tokens, 0).long()]
        return torch.where(inside, values, self.shift)

    def add_to(self, rows: TensorDictBase) -> TensorDictBase:
        """Rows ``[*B, T]`` with the rewards of the agent's tokens added; the input is not modified."""
        agent, reward = entry(rows, AGENT_MASK), entry(rows, TOKEN_REWARD)
        more = torch.where(agent, self.rewards(entry(rows, TOKENS)), 0.0)
        return rows.copy().set(TOKEN_REWARD, (reward.double() + more).to(reward.dtype))


def token_frequencies(rows: TensorDictBase, *, agent_only: bool = False) -> dict[int, float]:
    """How often each token occurs in rows, as a share of all tokens: a table for :class:`TokenRewardTable`.

    Args:
        rows: rows ``[*B, T]``; padding is not counted.
        agent_only: count only the agent's tokens.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows, token_frequencies
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn("aba", reward=0.0)], terminated=True)], tokenizer, 8)
        >>> token_frequencies(rows, agent_only=True)  # a, b and the end of the action
        {0: 0.5, 1: 0.25, 4: 0.25}
    """
    counted = entry(rows, AGENT_MASK if agent_only else ATTENTION_MASK)
    count = torch.bincount(entry(rows, TOKENS)[counted].long())
    share = count.double() / count.sum().clamp_min(1)
    return {token: float(share[token]) for token in count.nonzero().flatten().tolist()}
