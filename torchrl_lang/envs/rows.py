"""Growing rows: how an environment appends tokens to a batch of transcripts, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.schema import ControlTokens

__all__ = ["Rows", "Utterance", "read_utterance"]


class Rows(NamedTuple):
    """A batch of transcripts, right-padded. Never changed in place: appending gives new tensors."""

    tokens: Tensor
    """int64 ``[N, T]``."""
    action_mask: Tensor
    """bool ``[N, T]``."""
    token_reward: Tensor
    """float32 ``[N, T]``."""
    length: Tensor
    """int64 ``[N]``: real tokens of each row."""

    @classmethod
    def empty(cls, n: int, width: int, pad: int, device: torch.device | None) -> Rows:
        """``n`` rows without a token."""
        return cls(
            torch.full((n, width), pad, dtype=torch.int64, device=device),
            torch.zeros((n, width), dtype=torch.bool, device=device),
            torch.zeros((n, width), dtype=torch.float32, device=device),
            torch.zeros((n,), dtype=torch.int64, device=device),
        )

    @property
    def attention_mask(self) -> Tensor:
        """True on real tokens, ``bool [N, T]``."""
        return torch.arange(self.tokens.shape[-1], device=self.tokens.device) < self.length[:, None]

    def where(self, mask: Tensor, other: Rows) -> Rows:
        """Our rows where ``mask`` (bool ``[N]``), the other's elsewhere."""
        return Rows(
            *(
                torch.where(mask.reshape(-1, *[1] * (mine.ndim - 1)), mine, theirs)
                for mine, theirs in zip(self, other, strict=True)
            )
        )

    def append(self, tokens: Tensor, keep: Tensor, agent: Tensor, reward: Tensor) -> tuple[Rows, Tensor]:
        """Append the kept tokens of each row, in order.

        Args:
            tokens: int64 ``[N, C]``.
            keep: bool ``[N, C]``: which of them to append.
            agent: bool ``[N, C]``: which of them the agent wrote.
            reward: float32 ``[N]``: sits on the last token that the agent wrote; zero where it wrote none.

        Returns:
            The longer rows, and bool ``[N]`` saying where tokens did not fit and were left out.
        """
        width = self.tokens.shape[-1]
        place = self.length[:, None] + keep.cumsum(-1) - 1
        # Tokens that are not kept or do not fit go to a spare column that is cut off again.
        place = torch.where(keep, place, width).clamp_max(width)
        written = keep & agent
        last_written = written & (written.cumsum(-1) == written.sum(-1, keepdim=True))
        token_reward = torch.where(last_written, reward[:, None], 0.0)
        wanted = self.length + keep.sum(-1)
        rows = Rows(
            _scatter(self.tokens, place, tokens),
            _scatter(self.action_mask, place, written),
            _scatter(self.token_reward, place, token_reward),
            wanted.clamp_max(width),
        )
        return rows, wanted > width


def _scatter(row: Tensor, place: Tensor, values: Tensor) -> Tensor:
    grown = row.new_empty((row.shape[0], row.shape[1] + 1))
    grown[:, :-1] = row
    return grown.scatter_(-1, place, values)[:, :-1]


class Utterance(NamedTuple):
    """The agent's utterances, read from a batch of actions."""

    tokens: Tensor
    """int64 ``[N, K]``, as they came."""
    length: Tensor
    """int64 ``[N]``: tokens before the end of the action."""
    closed: Tensor
    """bool ``[N]``: the agent itself wrote the end-of-action token."""


def read_utterance(action: Tensor, control: ControlTokens) -> Utterance:
    """Find where each action of ``int64 [N, K]`` ends: at its first end-of-action token, first padding, or ``K``.

    What stands behind the end is ignored. An action without any token is read as a bare end of action: its reward
    needs a token of the agent's to sit on.
    """
    is_end = action == control.end_of_action
    stops = is_end | (action == control.pad)
    length = (stops.cumsum(-1) == 0).sum(-1)
    at_stop = is_end.gather(-1, length.clamp_max(action.shape[-1] - 1)[:, None])[:, 0]
    closed = at_stop | (length == 0)
    return Utterance(action, length, closed)
