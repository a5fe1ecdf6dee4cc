"""The valid orders of tokens in a row, to reject damaged rows before an episode continues from them."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from torchrl_lang.envs.row_state import Rows
from torchrl_lang.schema import ControlTokens

__all__ = ["TokenKind", "check_order", "token_kinds"]


class TokenKind(IntEnum):
    """The role of a token in a row."""

    BEGIN_STATE = 0
    BEGIN_ACTION = 1
    ACTION = 2
    """A token of the agent other than its end of action."""
    END_OF_ACTION = 3
    """An end of action that the agent wrote."""
    CLOSED = 4
    """An end of action that the environment added to an utterance without one."""
    REPLY = 5
    """A token of the environment's text."""
    END_OF_STATE = 6
    END_OF_DIALOGUE = 7
    PADDING = 8
    """A padding token among the real ones, which is always an error."""


_AGENT = (TokenKind.ACTION, TokenKind.END_OF_ACTION)
_AFTER_TURN = (*_AGENT, TokenKind.REPLY, TokenKind.END_OF_DIALOGUE)  # the environment's reply may be empty
_FOLLOWERS: dict[TokenKind, tuple[TokenKind, ...]] = {
    TokenKind.BEGIN_STATE: (TokenKind.REPLY,),
    TokenKind.BEGIN_ACTION: _AGENT,
    TokenKind.ACTION: (*_AGENT, TokenKind.CLOSED),
    TokenKind.END_OF_ACTION: _AFTER_TURN,
    TokenKind.CLOSED: _AFTER_TURN,
    TokenKind.REPLY: (TokenKind.REPLY, TokenKind.END_OF_STATE),
    TokenKind.END_OF_STATE: (*_AGENT, TokenKind.END_OF_DIALOGUE),
    TokenKind.END_OF_DIALOGUE: (),
    TokenKind.PADDING: (),
}


def token_kinds(rows: Rows, control: ControlTokens) -> Tensor:
    """The :class:`TokenKind` of every token, int64 ``[N, T]``; undefined after a row's end."""
    own = torch.full_like(rows.tokens, TokenKind.REPLY)
    agent = torch.full_like(rows.tokens, TokenKind.ACTION)
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
    """Raise unless environments could have written the ``fresh`` rows (bool ``[N]``).

    Args:
        rows: the rows, none of them empty.
        kinds: their :func:`token_kinds`.
        fresh: the rows to check.

    Raises:
        ValueError: the message names the row, the position and the roles of the two tokens.
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
            f"Row {row} cannot be continued: at position {position} it has {part} {where}, an order that no "
            f"environment writes. Pass rows as reset and step return them."
        )
