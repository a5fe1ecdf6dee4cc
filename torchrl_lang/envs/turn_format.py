"""A turn of a language task: what the environment answers, and the tokens that opening words and turns are made of."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.envs.row_state import GrowingRows, Rows, Utterance, Writes
from torchrl_lang.schema import ControlTokens

__all__ = ["Reply", "initial_rows", "planned_turn"]


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
    truncated: Tensor | None = None
    """bool ``[N]``: the episode stops here for another reason; None where only turns and the row's room limit it."""


def initial_rows(
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
    said, replied = torch.where(live, utterance.length, 0), torch.where(live, reply.length, 0)
    parts = (
        (utterance.tokens, said),
        (end_of_action, live),
        (reply.tokens, replied),
        (end_of_state, replied > 0),
        (end_of_dialogue, live & reply.terminated),
    )
    length, width = rows.rows.length, rows.width
    place, wanted = [], length
    for tokens, number in parts:  # of each its first tokens are there
        column = torch.arange(tokens.shape[-1], device=tokens.device)
        place.append(torch.where(column < number[:, None], wanted[:, None] + column, width))
        wanted = wanted + number
    # The end is the agent's where it wrote it, the reply never is.
    agent = torch.cat([torch.ones_like(utterance.tokens, dtype=torch.bool), utterance.closed[:, None]], -1)
    reward_place = torch.where(live, length + said + utterance.closed - 1, width).clamp_max(width)
    writes = Writes(
        place=torch.cat(place, -1).clamp_max_(width),
        tokens=torch.cat([tokens for tokens, _ in parts], -1),
        agent=agent,
        reward_place=reward_place[:, None],
        reward=reply.reward[:, None],
        length=wanted.clamp_max(width),
    )
    return writes, wanted > width
