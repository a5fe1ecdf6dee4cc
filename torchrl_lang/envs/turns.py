"""A turn of a language task: what the environment answers, and the tokens that opening words and turns are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.envs.rows import GrowingRows, Rows, Utterance, Writes
from torchrl_lang.schema import ControlTokens

__all__ = ["Reply", "opened_rows", "planned_turn"]


class Reply(NamedTuple):
    """What the environment answers to a batch of utterances. Plain text only: the base adds the control tokens."""

    tokens: Tensor
    """int64 ``[N, R]``, right-padded."""
    length: Tensor
    """int64 ``[N]``: zero where the environment stays silent."""
    reward: Tensor
    """float32 ``[N]``: the reward of the turn."""
    terminated: Tensor
    """bool ``[N]``: the task has ended."""


def opened_rows(
    opening: Tensor, length: Tensor, control: ControlTokens, *, row_length: int, action_length: int
) -> Rows:
    """Rows, no wider than need be, that begin with the environment's words, or with the agent's turn where it has none.

    Args:
        opening: the words, int64 ``[N, R]``.
        length: their number, int64 ``[N]``.
        control: the control tokens.
        row_length: ``T``.
        action_length: ``K``.

    Raises:
        ValueError: the words leave no room for an utterance.
    """
    needed = opening.shape[-1] + 2 + action_length + 1
    if needed > row_length and opening.shape[-1]:
        raise ValueError(
            f"An opening of up to {opening.shape[-1]} tokens leaves no room for an utterance: row_length is "
            f"{row_length}, give at least {needed}."
        )
    speaks = length > 0
    first = torch.where(speaks, control.begin_state, control.begin_action)[:, None]
    place = torch.arange(opening.shape[-1] + 1, device=opening.device)
    ends = (place == length[:, None]) & speaks[:, None]
    said = torch.where(place < length[:, None], torch.cat([opening, first], -1), control.pad)
    head = torch.cat([first, torch.where(ends, control.end_of_state, said)], -1)
    none = torch.zeros((1, 1), dtype=torch.float32, device=head.device).expand_as(head)
    return Rows(head, none.to(torch.bool), none, 1 + torch.where(speaks, length + 1, 0))


def planned_turn(
    rows: GrowingRows, utterance: Utterance, reply: Reply, live: Tensor, control: ControlTokens
) -> tuple[Writes, Tensor]:
    """Plan to append utterance, its end, the reply, its end, the end of the dialogue to the rows that are ``live``.

    Returns:
        What is to be written, and where tokens do not fit, bool ``[N]``.
    """
    ends = (control.end_of_action, control.end_of_state, control.end_of_dialogue)
    end_of_action, end_of_state, end_of_dialogue = (torch.full_like(utterance.length[:, None], t) for t in ends)
    tokens = torch.cat([utterance.tokens, end_of_action, reply.tokens, end_of_state, end_of_dialogue], -1)
    offset, keep = _offsets(utterance, reply)
    keep = keep & live[:, None]
    column = torch.arange(tokens.shape[-1], device=tokens.device)
    # The end is the agent's where it wrote it, the reply never is.
    agent = keep & (column < utterance.tokens.shape[-1] + utterance.closed[:, None])
    said = utterance.length + utterance.closed  # [N], tokens that the agent wrote
    length, width = rows.rows.length, rows.rows.tokens.shape[-1]
    place = torch.where(keep, length[:, None] + offset, width).clamp_max(width)
    reward_place = torch.where(live, length + said - 1, width).clamp_max(width)
    added = utterance.length + 1 + reply.length + (reply.length > 0) + reply.terminated
    wanted = length + torch.where(live, added, 0)
    writes = Writes(place, tokens, agent, reward_place[:, None], reply.reward[:, None], wanted.clamp_max(width))
    return writes, wanted > width


def _offsets(utterance: Utterance, reply: Reply) -> tuple[Tensor, Tensor]:
    """How far behind the row each token of a turn stands, int64 ``[N, C]``, and which are there at all, bool.

    The parts are utterance, its end, reply, its end, end of the dialogue, and of each the first tokens are there.
    """
    said, replied = utterance.tokens.shape[-1], reply.tokens.shape[-1]
    column = torch.arange(said + replied + 3, device=reply.length.device)
    part = (
        (column >= said).to(torch.int64) + (column > said) + (column > said + replied) + (column > said + replied + 1)
    )
    within = torch.where(part == 0, column, torch.where(part == 2, column - said - 1, 0))
    speaks = (reply.length > 0).to(torch.int64)
    ends = reply.terminated.to(torch.int64)
    counts = torch.stack([utterance.length, torch.ones_like(speaks), reply.length, speaks, ends], -1)  # [N, 5]
    before = counts.cumsum(-1) - counts
    index = part.expand(speaks.shape[0], -1)
    return before.gather(-1, index) + within, within < counts.gather(-1, index)
