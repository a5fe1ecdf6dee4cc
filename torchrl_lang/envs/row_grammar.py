"""Which token may follow which in a row: damaged rows are refused before an episode continues from them."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from torchrl_lang.envs.row_state import Rows
from torchrl_lang.schema import ControlTokens

__all__ = ["TokenKind", "check_order", "token_kinds"]


class TokenKind(IntEnum):
    """The part that a token plays in a row."""

    BEGIN_STATE = 0
    BEGIN_ACTION = 1
    SAID = 2
    """A token of the agent's, other than its end of action."""
    END_OF_ACTION = 3
    """Written by the agent."""
    CLOSED = 4
    """An end of action that the environment wrote, behind an utterance without one."""
    REPLY = 5
    """A token of the environment's text."""
    END_OF_STATE = 6
    END_OF_DIALOGUE = 7
    PADDING = 8
    """The padding token among the real ones, where it has no place."""


_AGENT = (TokenKind.SAID, TokenKind.END_OF_ACTION)
_AFTER_TURN = (*_AGENT, TokenKind.REPLY, TokenKind.END_OF_DIALOGUE)  # an environment may answer nothing
_FOLLOWERS: dict[TokenKind, tuple[TokenKind, ...]] = {
    TokenKind.BEGIN_STATE: (TokenKind.REPLY,),
    TokenKind.BEGIN_ACTION: _AGENT,
    TokenKind.SAID: (*_AGENT, TokenKind.CLOSED),
    TokenKind.END_OF_ACTION: _AFTER_TURN,
    TokenKind.CLOSED: _AFTER_TURN,
    TokenKind.REPLY: (TokenKind.REPLY, TokenKind.END_OF_STATE),
    TokenKind.END_OF_STATE: (*_AGENT, TokenKind.END_OF_DIALOGUE),
    TokenKind.END_OF_DIALOGUE: (),
    TokenKind.PADDING: (),
}


def token_kinds(rows: Rows, control: ControlTokens) -> Tensor:
    """The :class:`TokenKind` of every token, int64 ``[N, T]``; without meaning right of a row's end."""
    own = torch.full_like(rows.tokens, TokenKind.REPLY)
    agent = torch.full_like(rows.tokens, TokenKind.SAID)
    agent = torch.where(rows.tokens == control.end_of_action, int(TokenKind.END_OF_ACTION), agent)
    for token, kind in (
        (control.begin_state, TokenKind.BEGIN_STATE),
        (control.begin_action, TokenKind.BEGIN_ACTION),
        (control.end_of_action, TokenKind.CLOSED),
        (control.end_of_state, TokenKind.END_OF_STATE),
        (control.end_of_dialogue, TokenKind.END_OF_DIALOGUE),
    ):
        own = torch.where(rows.tokens == token, int(kind), own)
    kinds = torch.where(rows.action_mask, agent, own)
    return torch.where(rows.tokens == control.pad, int(TokenKind.PADDING), kinds)


def check_order(rows: Rows, kinds: Tensor, fresh: Tensor) -> None:
    """Raise unless the ``fresh`` rows (bool ``[N]``) have their tokens in an order that environments write.

    Args:
        rows: the rows; none is empty.
        kinds: their :func:`token_kinds`.
        fresh: which of them are looked at.

    Raises:
        ValueError: the message names the row, the position and the two tokens' parts.
    """
    n = len(TokenKind)
    allowed = torch.zeros((n, n), dtype=torch.bool, device=kinds.device)
    for kind, followers in _FOLLOWERS.items():
        allowed[kind, list(followers)] = True
    begins = kinds[:, :1] <= TokenKind.BEGIN_ACTION
    follows = allowed[kinds[:, :-1], kinds[:, 1:]]
    bad = rows.attention_mask & fresh[:, None] & ~torch.cat([begins, follows], -1)
    if bad.any():
        row, position = bad.nonzero()[0].tolist()
        part = TokenKind(int(kinds[row, position])).name
        where = f"after {TokenKind(int(kinds[row, position - 1])).name}" if position else "at its beginning"
        raise ValueError(
            f"Row {row} cannot go on: at position {position} it has {part} {where}, an order that no environment "
            f"writes. Give rows as reset and step return them."
        )
