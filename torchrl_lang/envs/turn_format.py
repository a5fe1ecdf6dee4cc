"""The reply of an environment, and the tokens of openings and turns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.envs.row_state import GrowingRows, Rows, Utterance, Writes
from torchrl_lang.schema import ControlTokens

__all__ = ["Reply", "initial_rows", "planned_turn"]


class Reply(NamedTuple):
    """The environment's reply to a batch of utterances. Plain text only: the base class adds the control tokens."""

    tokens: Tensor
    """int64 ``[N, R]``, right-padded."""
    length: Tensor
    """int64 ``[N]``: zero if the environment writes nothing."""
    reward: Tensor
    """float32 ``[N]``: the reward of the turn."""
    terminated: Tensor
    """bool ``[N]``: the task has terminated."""
    truncated: Tensor | None = None
    """bool ``[N]``: the task truncates the episode; None if only the limits of turns and of the row do."""


def initial_rows(
    opening: Tensor, length: Tensor, control: ControlTokens, *, row_length: int, action_length: int
) -> Rows:
    """Rows of minimal width that begin with the environment's opening, or with the agent's turn if it is empty.

    Args:
        opening: the opening tokens, int64 ``[N, R]``.
        length: their number, int64 ``[N]``.
        control: the control tokens.
        row_length: ``T``.
        action_length: ``K``.

    Raises:
        ValueError: the opening leaves no room for an utterance.
    """
    needed = opening.shape[-1] + 2 + action_length + 1
    if needed > row_length and opening.shape[-1]:
        raise ValueError(
            f"An opening of up to {opening.shape[-1]} tokens leaves no room for an utterance: row_length is "
            f"{row_length}, give at least {needed}."
        )
    has_opening = length > 0
    first = torch.where(has_opening, control.begin_state, control.begin_action)[:, None]
    place = torch.arange(opening.shape[-1] + 1, device=opening.device)
    ends = (place == length[:, None]) & has_opening[:, None]
    text = torch.where(place < length[:, None], torch.cat([opening, first], -1), control.pad)
    head = torch.cat([first, torch.where(ends, control.end_of_state, text)], -1)
    none = torch.zeros((1, 1), dtype=torch.float32, device=head.device).expand_as(head)
    return Rows(head, none.to(torch.bool), none, 1 + torch.where(has_opening, length + 1, 0))


def planned_turn(
    rows: GrowingRows, utterance: Utterance, reply: Reply, live: Tensor, control: ControlTokens
) -> tuple[Writes, Tensor]:
    """Plan to append the utterance, the reply, their end tokens and the end of the dialogue to the ``live`` rows.

    Returns:
        What to write, and where tokens do not fit, bool ``[N]``.
    """
    ends = (control.end_of_action, control.end_of_state, control.end_of_dialogue)
    end_of_action, end_of_state, end_of_dialogue = (torch.full_like(utterance.length[:, None], t) for t in ends)
    uttered, replied = torch.where(live, utterance.length, 0), torch.where(live, reply.length, 0)
    parts = (
        (utterance.tokens, uttered),
        (end_of_action, live),
        (reply.tokens, replied),
        (end_of_state, replied > 0),
        (end_of_dialogue, live & reply.terminated),
    )
    length, width = rows.rows.length, rows.width
    place, wanted = [], length
    for tokens, number in parts:  # the first ``number`` tokens of each
        column = torch.arange(tokens.shape[-1], device=tokens.device)
        place.append(torch.where(column < number[:, None], wanted[:, None] + column, width))
        wanted = wanted + number
    # The end-of-action token belongs to the agent if it wrote it; the reply is never the agent's.
    agent = torch.cat([torch.ones_like(utterance.tokens, dtype=torch.bool), utterance.closed[:, None]], -1)
    reward_place = torch.where(live, length + uttered + utterance.closed - 1, width).clamp_max(width)
    writes = Writes(
        place=torch.cat(place, -1).clamp_max_(width),
        tokens=torch.cat([tokens for tokens, _ in parts], -1),
        agent=agent,
        reward_place=reward_place[:, None],
        reward=reply.reward[:, None],
        length=wanted.clamp_max(width),
    )
    return writes, wanted > width
