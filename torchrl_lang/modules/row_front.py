"""Rows with something in front of their tokens, such as features or privileged tokens: how both are laid out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["behind", "in_front"]


def in_front(front: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
    """Rows of ids that begin with those of ``front`` that are real, in their order, without a gap.

    Args:
        front: int64 ``[*B, P]``.
        mask: bool ``[*B, P]``: True on real ids of ``front``; None where all are real.
        tokens: int64 ``[*B, T]``, which follow.

    Returns:
        int64 ``[*B, P + T]``; padding repeats the last token.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.row_front import in_front
        >>> mask = torch.tensor([[False, True], [True, True]])
        >>> in_front(torch.tensor([[1, 2], [3, 4]]), mask, torch.tensor([[7, 8], [5, 6]]))
        tensor([[2, 7, 8, 8],
                [3, 4, 5, 6]])
    """
    if mask is None:
        return torch.cat([front, tokens], -1)
    width = tokens.shape[-1]
    front = front.gather(-1, (~mask).long().argsort(dim=-1, stable=True))  # real ones first
    place, number = torch.arange(front.shape[-1] + width, device=tokens.device), mask.sum(-1, keepdim=True)
    own = tokens.gather(-1, (place - number).clamp(0, width - 1))
    return torch.where(place < number, nn.functional.pad(front, (0, width)), own)


def behind(states: Tensor, number: Tensor, width: int) -> Tensor:
    """The states of the tokens of rows that begin with ``number`` others, ``[*B, P + T, H] -> [*B, T, H]``.

    Args:
        states: those of all places.
        number: int64 ``[*B]``, at most ``P``.
        width: ``T``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.row_front import behind
        >>> behind(torch.arange(8).reshape(2, 4, 1), torch.tensor([1, 2]), 2).squeeze(-1)
        tensor([[1, 2],
                [6, 7]])
    """
    place = number.unsqueeze(-1) + torch.arange(width, device=states.device)
    return states.gather(-2, place.unsqueeze(-1).expand(*place.shape, states.shape[-1]))
