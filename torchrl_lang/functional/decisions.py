"""States, actions and successors of the decisions in a row, computed from its masks.

Position ``p`` is a *decision* if ``agent_mask[p + 1]``: the state is the row up to and including ``p``, the action is
``tokens[p + 1]``. The successor of a decision is the row's next decision, so a turn of the environment in between adds
no discount of its own. The successor of the last decision is the row's last real position, its *bootstrap state*.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Decisions",
    "bootstrap_mask",
    "decision_mask",
    "find_decisions",
    "row_length",
    "shift_left",
    "shift_right",
    "trained_states",
    "utterance_ends",
]


def shift_left(values: Tensor) -> Tensor:
    """Shift by one position to the left, with zero (False) at the end: ``out[..., p] = values[..., p + 1]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import shift_left
        >>> shift_left(torch.tensor([1, 2, 3]))
        tensor([2, 3, 0])
    """
    return torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], -1)


def shift_right(values: Tensor) -> Tensor:
    """Shift by one position to the right, with zero (False) at the start: ``out[..., p] = values[..., p - 1]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import shift_right
        >>> shift_right(torch.tensor([1, 2, 3]))
        tensor([0, 1, 2])
    """
    return torch.cat([torch.zeros_like(values[..., :1]), values[..., :-1]], -1)


def decision_mask(agent_mask: Tensor) -> Tensor:
    """True where the next token is the agent's, ``bool [*B, T]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import decision_mask
        >>> decision_mask(torch.tensor([False, True, True, False]))
        tensor([ True,  True, False, False])
    """
    return shift_left(agent_mask)


def row_length(attention_mask: Tensor) -> Tensor:
    """Number of real tokens of each row, ``int64 [*B]``."""
    return attention_mask.sum(-1)


def bootstrap_mask(attention_mask: Tensor, agent_mask: Tensor) -> Tensor:
    """True on the last real position of each row that has a decision, ``bool [*B, T]``."""
    last = attention_mask & ~shift_left(attention_mask)
    return last & decision_mask(agent_mask).any(-1, keepdim=True)


def utterance_ends(tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor, end_of_action: int) -> Tensor:
    """True at the end-of-action token of each utterance, ``bool [*B, T]``.

    The agent writes that token, or the environment right after an utterance without one. A chat template may end texts
    of the environment with the same token; these are not marked.

    Args:
        tokens: int ``[*B, T]``.
        attention_mask: bool ``[*B, T]``.
        agent_mask: bool ``[*B, T]``.
        end_of_action: id of the token.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import utterance_ends
        >>> tokens = torch.tensor([5, 1, 7, 8, 1, 6, 1])
        >>> agent = torch.tensor([False, False, True, True, False, False, False])
        >>> utterance_ends(tokens, torch.ones(7, dtype=torch.bool), agent, end_of_action=1).nonzero().flatten()
        tensor([4])
    """
    return attention_mask & (tokens == end_of_action) & (agent_mask | shift_right(agent_mask))


class Decisions(NamedTuple):
    """The states of a batch of rows in reading order, ``S`` in total, ``N`` of which are decisions.

    The successor of the decision at index ``i`` of the states is the state at ``i + 1``: the row's next decision or its
    bootstrap state. So the values of a decision and its successor are ``v[state]`` and ``v[state + 1]``.
    """

    row: Tensor
    """int64 ``[S]``: the row of each state, for a batch flattened to ``[B, T]``."""
    position: Tensor
    """int64 ``[S]``: the position of each state."""
    state: Tensor
    """int64 ``[N]``: the index of each decision among the states."""
    last: Tensor
    """bool ``[N]``: True if the successor is the row's bootstrap state."""


def find_decisions(attention_mask: Tensor, agent_mask: Tensor) -> Decisions:
    """Find the decisions of a batch of rows.

    Args:
        attention_mask: bool ``[B, T]``, True on real tokens, padded on the right.
        agent_mask: bool ``[B, T]``, True on tokens that the agent wrote.

    Returns:
        The :class:`Decisions` of the batch. Rows without an action have no states.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import find_decisions
        >>> real = torch.tensor([[True, True, True, True, False]])
        >>> agent = torch.tensor([[False, True, False, True, False]])
        >>> found = find_decisions(real, agent)
        >>> found.position  # decisions at 0 and 2, the bootstrap state at 3
        tensor([0, 2, 3])
        >>> found.state, found.last
        (tensor([0, 1]), tensor([False,  True]))
    """
    decision = decision_mask(agent_mask)
    bootstrap = bootstrap_mask(attention_mask, agent_mask)
    row, position = (decision | bootstrap).nonzero(as_tuple=True)
    is_bootstrap = bootstrap[row, position]
    state = (~is_bootstrap).nonzero(as_tuple=True)[0]
    return Decisions(row, position, state, is_bootstrap[state + 1])


def trained_states(train_mask: Tensor, agent_mask: Tensor) -> Tensor:
    """True at the states that count in a loss, ``bool [*B, T]``: all whose next token is not excluded from training.

    A loss's ``loss_mask_key`` reads a decision's mask at the position of its state, one before the token. The mask of
    the environment's tokens is ignored: they always count, for losses with a ``transition_weight``.

    Args:
        train_mask: bool ``[*B, T]``, False on agent tokens excluded from training; ignored elsewhere.
        agent_mask: bool ``[*B, T]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import trained_states
        >>> agent = torch.tensor([False, True, True, False, True])
        >>> train_mask = torch.tensor([False, False, False, False, True])
        >>> trained_states(train_mask, agent)
        tensor([False, False,  True,  True,  True])
    """
    return shift_left(train_mask) | ~decision_mask(agent_mask)
