"""Tensor operations that append tokens to a batch of transcripts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.schema import ControlTokens

__all__ = ["GrowingRows", "Rows", "Utterance", "read_utterance", "where_rows"]


def where_rows(mask: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """Our rows where ``mask`` (bool ``[N]``), their rows elsewhere; tensors ``[N, ...]``."""
    if ours.ndim > 1 and ours.element_size() == 1:
        # On a CPU copying whole rows of bytes is four times as fast as torch.where on bytes.
        row = torch.arange(mask.shape[0], device=mask.device)
        return torch.cat([ours, theirs]).index_select(0, torch.where(mask, row, row + mask.shape[0]))
    return torch.where(mask.reshape(-1, *[1] * (ours.ndim - 1)), ours, theirs)


class Rows(NamedTuple):
    """A batch of transcripts, right-padded. Immutable: appending returns new tensors."""

    tokens: Tensor
    """int64 ``[N, T]``."""
    action_mask: Tensor
    """bool ``[N, T]``."""
    token_reward: Tensor
    """float32 ``[N, T]``."""
    length: Tensor
    """int64 ``[N]``: number of real tokens of each row."""

    @property
    def attention_mask(self) -> Tensor:
        """True on real tokens, ``bool [N, T]``."""
        # Each row of the mask is a window of this vector; on a CPU that is eight times as fast as comparing.
        width = self.tokens.shape[-1]
        mask = torch.arange(2 * width, device=self.tokens.device) < width
        return mask.unfold(0, width, 1).index_select(0, width - self.length)

    def append(self, tokens: Tensor, keep: Tensor, agent: Tensor, reward: Tensor) -> tuple[Rows, Tensor]:
        """Append the kept tokens of each row, in order.

        Args:
            tokens: int64 ``[N, C]``.
            keep: bool ``[N, C]``: the tokens to append.
            agent: bool ``[N, C]``: True on tokens of the agent.
            reward: float32 ``[N]``: placed on the agent's last token; zero if there is none.

        Returns:
            The longer rows, and bool ``[N]``, True where tokens did not fit and were dropped.
        """
        growing = GrowingRows(self, self.tokens.shape[-1])
        overflow = growing.append_(tokens, keep, agent, reward)
        return growing.rows, overflow


class Writes(NamedTuple):
    """What a turn writes to growing rows and where, computed before the rows are touched."""

    place: Tensor
    """int64 ``[N, C]``: the column of each token; a spare column for tokens that are not kept or do not fit."""
    tokens: Tensor
    """int64 ``[N, C]``."""
    agent: Tensor
    """bool ``[N, A]``: True on the agent's tokens among the first ``A``; the others are the environment's."""
    reward_place: Tensor
    """int64 ``[N, 1]``: the column of the agent's last token."""
    reward: Tensor
    """float32 ``[N, 1]``."""
    length: Tensor
    """int64 ``[N]``: the new lengths of the rows."""


class GrowingRows:
    """A batch of transcripts that grow in place: a turn writes its own tokens and copies nothing else.

    Args:
        rows: the transcripts, which may be narrower than ``width``; they are copied.
        width: ``T``.
        pad: the padding token.
    """

    def __init__(self, rows: Rows, width: int, pad: int = 0) -> None:
        # The spare column after each row is written and never read.
        shape, self._fill = (rows.tokens.shape[0], width + 1), (pad, False, 0.0)
        self._wide = tuple(entry.new_empty(shape) for entry in rows[:3])
        self.restart_(rows)

    @property
    def width(self) -> int:
        """``T``."""
        return self._wide[0].shape[-1] - 1

    @property
    def writable(self) -> bool:
        """Whether this memory can be written: memory allocated in inference mode cannot be written outside it."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return True
        return not any(entry.is_inference() for entry in self._wide)

    @property
    def rows(self) -> Rows:
        """The rows as a view of this memory; copy them to keep them."""
        tokens, action_mask, token_reward = (entry[:, :-1] for entry in self._wide)
        return Rows(tokens, action_mask, token_reward, self._length)

    def at(self, index: Tensor) -> Rows:
        """A copy of the rows ``index``, int64 ``[M]``."""
        return Rows(*(entry.index_select(0, index) for entry in self.rows))

    def restart_(self, rows: Rows) -> None:
        """Replace all rows by others, which may be narrower."""
        self._length = rows.length.clone()
        for mine, given, fill in zip(self._wide, rows[:3], self._fill, strict=True):
            mine.fill_(fill)
            mine[:, : given.shape[1]] = given

    def replace_(self, mask: Tensor, rows: Rows) -> None:
        """Replace the rows where ``mask``, bool ``[N]``, by others, which may be narrower."""
        self._length = torch.where(mask, rows.length, self._length)
        if torch.compiler.is_compiling():  # compiled code must not depend on the number of rows
            for mine, given, fill in zip(self._wide, rows[:3], self._fill, strict=True):
                spare = mine.shape[1] - given.shape[1]
                mine.copy_(where_rows(mask, torch.nn.functional.pad(given, (0, spare), value=fill), mine))
            return
        index = mask.nonzero()[:, 0]
        for mine, given, fill in zip(self._wide, rows[:3], self._fill, strict=True):
            mine.index_fill_(0, index, fill)
            mine[:, : given.shape[1]].index_copy_(0, index, given.index_select(0, index))

    def append_(self, tokens: Tensor, keep: Tensor, agent: Tensor, reward: Tensor) -> Tensor:
        """Append tokens in place, see :meth:`Rows.append`; returns where some did not fit, bool ``[N]``."""
        if not tokens.shape[-1]:
            return torch.zeros_like(self._length, dtype=torch.bool)
        writes, overflow = self.plan(tokens, keep, agent, reward)
        self.write_(writes)
        return overflow

    def plan(self, tokens: Tensor, keep: Tensor, agent: Tensor, reward: Tensor) -> tuple[Writes, Tensor]:
        """Compute what :meth:`append_` writes, and where tokens do not fit, bool ``[N]``."""
        width = self.width
        kept = keep.cumsum(-1)
        place = torch.where(keep, self._length[:, None] + kept - 1, width).clamp_max(width)
        written = keep & agent
        # Everything after a row's end is zero, so only one reward has to be written.
        # (max, because amax takes ten times as long for int64 on a CPU.)
        last_written = torch.where(written, place, -1).max(-1, keepdim=True).values
        reward_place = torch.where(last_written < 0, width, last_written)
        wanted = self._length + keep.sum(-1)
        writes = Writes(place, tokens, written, reward_place, reward[:, None], wanted.clamp_max(width))
        return writes, wanted > width

    def write_(self, writes: Writes) -> None:
        """Write a plan of :meth:`plan`."""
        tokens, action_mask, token_reward = self._wide
        tokens.scatter_(-1, writes.place, writes.tokens)
        action_mask.scatter_(-1, writes.place[:, : writes.agent.shape[-1]], writes.agent)
        token_reward.scatter_(-1, writes.reward_place, writes.reward)
        self._length = writes.length


class Utterance(NamedTuple):
    """The agent's utterances, read from a batch of actions."""

    tokens: Tensor
    """int64 ``[N, K]``, as passed."""
    length: Tensor
    """int64 ``[N]``: number of tokens before the end of the action."""
    closed: Tensor
    """bool ``[N]``: the agent wrote the end-of-action token."""


def read_utterance(action: Tensor, control: ControlTokens) -> Utterance:
    """Find where each action of ``int64 [N, K]`` ends: at its first end-of-action token, first padding, or ``K``.

    Tokens after the end are ignored. An action without tokens is treated as a single end-of-action token, because its
    reward needs a token of the agent.
    """
    is_end = action == control.end_of_action
    stops = is_end | (action == control.pad)
    place = torch.arange(action.shape[-1], device=action.device)
    # min, because amin takes ten times as long for int64 on a CPU.
    length = torch.where(stops, place, action.shape[-1]).min(-1).values
    at_stop = is_end.gather(-1, length.clamp_max(action.shape[-1] - 1)[:, None])[:, 0]
    closed = at_stop | (length == 0)
    return Utterance(action, length, closed)
