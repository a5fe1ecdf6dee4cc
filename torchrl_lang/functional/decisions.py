"""Decisions and utterances of the agent in a row, computed from its masks.

Position ``p`` is a *decision* if ``agent_mask[p + 1]``: the state is the row up to and including ``p``, the action is
``tokens[p + 1]``. The successor of a decision is the row's next decision, so a turn of the environment in between adds
no discount of its own. The successor of the last decision is the row's last real position, its *bootstrap state*.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def shift_left(values: Tensor) -> Tensor:
    """Shift by one position to the left, with zero (False) at the end: ``out[..., p] = values[..., p + 1]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import shift_left
        >>> shift_left(torch.tensor([[1, 2, 3], [4, 5, 6]]))
        tensor([[2, 3, 0],
                [5, 6, 0]])
    """
    return torch.cat([values[..., 1:], torch.zeros_like(values[..., :1])], -1)


def shift_right(values: Tensor) -> Tensor:
    """Shift by one position to the right, with zero (False) at the start: ``out[..., p] = values[..., p - 1]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.decisions import shift_right
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
    """Count the real tokens of each row, ``int64 [*B]``."""
    return attention_mask.sum(-1)


def until_last_decision(attention_mask: Tensor, agent_mask: Tensor, terminated: Tensor | None = None) -> Tensor:
    """True at the tokens of each row up to its last decision, ``bool [*B, T]``; of a row without one, at its first.

    Attention is causal, so a model that reads these tokens has the states of all decisions. Where ``terminated``,
    ``bool [*B]``, is False all real tokens count, because the last state bootstraps.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.decisions import until_last_decision
        >>> until_last_decision(torch.ones(1, 5, dtype=torch.bool), torch.tensor([[False, True, False, True, False]]))
        tensor([[ True,  True,  True, False, False]])
    """
    position = torch.arange(agent_mask.shape[-1], device=agent_mask.device)
    end = torch.where(agent_mask, position, 0).amax(-1)  # the last of the agent's tokens, which is not read
    end = end if terminated is None else torch.where(terminated, end, row_length(attention_mask))
    return attention_mask & (position < end.clamp_min(1)[..., None])


def utterance_ends(tokens: Tensor, attention_mask: Tensor, agent_mask: Tensor, end_of_action: int) -> Tensor:
    """True at the end-of-action token of each utterance, ``bool [*B, T]``.

    The agent writes that token, or the environment right after an utterance without one. A chat template may end texts
    of the environment with the same token; these are not marked.
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
        >>> from torchrl_lang.functional.decisions import find_decisions
        >>> real = torch.tensor([[True, True, True, True, False]])
        >>> agent = torch.tensor([[False, True, False, True, False]])
        >>> found = find_decisions(real, agent)
        >>> found.position  # decisions at 0 and 2, the bootstrap state at 3
        tensor([0, 2, 3])
        >>> found.state, found.last
        (tensor([0, 1]), tensor([False,  True]))
    """
    decision, last = decision_mask(agent_mask), attention_mask & ~shift_left(attention_mask)
    bootstrap = last & decision.any(-1, keepdim=True)
    row, position = (decision | bootstrap).nonzero(as_tuple=True)
    is_bootstrap = bootstrap[row, position]
    state = (~is_bootstrap).nonzero(as_tuple=True)[0]
    return Decisions(row, position, state, is_bootstrap[state + 1])


def trained_states(train_mask: Tensor, agent_mask: Tensor) -> Tensor:
    """True at the states that count in a loss, ``bool [*B, T]``: all whose next token is not excluded from training.

    A loss's ``loss_mask_key`` reads a decision's mask at the position of its state, one before the token. The mask of
    the environment's tokens is ignored: they always count, for losses with a ``transition_weight``.
    """
    return shift_left(train_mask) | ~decision_mask(agent_mask)


class UtteranceSpans(NamedTuple):
    """The ``U`` finished utterances of a batch of rows in reading order, and its ``S`` states.

    The state of an utterance is the position before its first token. The successor of the utterance at index ``i`` of
    the states is the state at ``i + 1``: the row's next utterance or its bootstrap state.
    """

    row: Tensor
    """int64 ``[S]``: the row of each state, for a batch flattened to ``[B, T]``."""
    position: Tensor
    """int64 ``[S]``: the position of each state."""
    state: Tensor
    """int64 ``[U]``: the index of each utterance among the states."""
    end: Tensor
    """int64 ``[U]``: the position of each utterance's last decision."""
    last: Tensor
    """bool ``[U]``: True if the successor is the row's bootstrap state."""
    of_decision: Tensor
    """int64 ``[N]``: the utterance of each decision of the batch, ``U`` for those of an unfinished one."""

    def total(self, reward: Tensor) -> Tensor:
        """Sum the rewards of each utterance, ``[N] -> [U]``."""
        count = self.state.shape[0]
        return reward.new_zeros(count + 1).index_add(0, self.of_decision, reward)[:count]


def find_utterances(attention_mask: Tensor, agent_mask: Tensor, turn_end: Tensor, terminated: Tensor) -> UtteranceSpans:
    """Find the utterances of a batch of rows.

    An utterance ends at a decision that ``turn_end`` marks or, in a terminated row, at the row's last decision. Tokens
    that no end follows are an utterance that was cut off: it is not among the utterances, and its state, in which the
    agent was to act, is the row's bootstrap state. Otherwise that is the last real position.

    Args:
        attention_mask: bool ``[B, T]``, True on real tokens, padded on the right.
        agent_mask: bool ``[B, T]``, True on tokens that the agent wrote.
        turn_end: bool ``[B, T]``, True at the last decision of an utterance, see :func:`turn_end_mask`.
        terminated: bool ``[B]``.

    Returns:
        The :class:`UtteranceSpans` of the batch. Rows without a finished utterance have no states.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import turn_end_mask
        >>> from torchrl_lang.functional.decisions import find_utterances
        >>> real = torch.ones(1, 7, dtype=torch.bool)
        >>> agent = torch.tensor([[False, True, True, False, True, False, False]])
        >>> found = find_utterances(real, agent, turn_end_mask(real, agent), torch.tensor([True]))
        >>> found.position  # utterances from 0 and from 3, the bootstrap state at 6
        tensor([0, 3, 6])
        >>> found.end, found.last
        (tensor([1, 3]), tensor([False,  True]))
        >>> found.total(torch.tensor([0.5, 0.25, -1.0]))  # of the decisions at 0, 1 and 3
        tensor([ 0.7500, -1.0000])
    """
    decision = decision_mask(agent_mask)
    row_end = decision & (decision.cumsum(-1) == decision.sum(-1, keepdim=True))
    end = decision & (turn_end | (row_end & terminated[:, None]))
    begin = begins_utterance(decision, end)
    ends_later = end.sum(-1, keepdim=True) > end.cumsum(-1) - end.long()
    finished = begin & ends_later
    cut = begin & ~ends_later
    last_real = attention_mask & ~shift_left(attention_mask)
    bootstrap = torch.where(cut.any(-1, keepdim=True), cut, last_real) & end.any(-1, keepdim=True)
    row, position = (finished | bootstrap).nonzero(as_tuple=True)
    is_bootstrap = bootstrap[row, position]
    state = (~is_bootstrap).nonzero(as_tuple=True)[0]
    number = torch.where(ends_later, finished.flatten().cumsum(0).reshape(end.shape) - 1, state.shape[0])
    return UtteranceSpans(
        row, position, state, end.nonzero(as_tuple=True)[1], is_bootstrap[state + 1], number[decision]
    )


def begins_utterance(decision: Tensor, end: Tensor) -> Tensor:
    """True at decisions that do not continue the decision before, both bool ``[*B, T]``; ``end``s are not continued."""
    return decision & ~shift_right(decision & ~end)


def running_mean(states: Tensor) -> Tensor:
    """Compute the mean of the states up to each position, ``[*B, T, H] -> [*B, T, H]``, at least in float32."""
    count = torch.arange(1, states.shape[-2] + 1, device=states.device)
    return states.to(torch.promote_types(states.dtype, torch.float32)).cumsum(-2) / count[:, None]


def turn_end_mask(
    attention_mask: Tensor, agent_mask: Tensor, tokens: Tensor | None = None, end_of_action: int | None = None
) -> Tensor:
    """True at the last decision of each utterance that another turn may follow, ``bool [*B, T]``.

    Without ``end_of_action`` an utterance ends where a token of the environment follows. If the environment may write
    nothing between two utterances, or a row ends with the agent's token, pass ``end_of_action``; otherwise such an
    utterance counts as unfinished.

    Args:
        attention_mask: bool ``[*B, T]``.
        agent_mask: bool ``[*B, T]``.
        tokens: int64 ``[*B, T]``, with ``end_of_action``.
        end_of_action: id of the token that ends an utterance.

    Raises:
        ValueError: ``end_of_action`` is given without ``tokens``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import turn_end_mask
        >>> agent = torch.tensor([False, True, True, False, True])
        >>> turn_end_mask(torch.ones(5, dtype=torch.bool), agent)
        tensor([False,  True, False, False, False])
        >>> turn_end_mask(torch.ones(5, dtype=torch.bool), agent, torch.tensor([3, 7, 1, 2, 1]), end_of_action=1)
        tensor([False,  True, False,  True, False])
        >>> silent = torch.tensor([False, True, True, True, True])  # the environment writes nothing between two
        >>> turn_end_mask(torch.ones(5, dtype=torch.bool), silent, torch.tensor([3, 7, 1, 7, 1]), end_of_action=1)
        tensor([False,  True, False,  True, False])
    """
    decision = decision_mask(agent_mask)
    environment_follows = shift_left(shift_left(attention_mask & ~agent_mask))
    ends = decision & environment_follows
    if end_of_action is None:
        return ends
    if tokens is None:
        raise ValueError(f"end_of_action={end_of_action} needs tokens, in which it is looked up: pass tokens as well.")
    return ends | (decision & (shift_left(tokens) == end_of_action))


def utterance_states(
    attention_mask: Tensor, agent_mask: Tensor, tokens: Tensor | None = None, end_of_action: int | None = None
) -> Tensor:
    """True at the position before the first token of each utterance, ``bool [*B, T]``.

    Utterances end as in :func:`turn_end_mask`: without ``end_of_action`` two with nothing between them count as one.
    """
    ends = turn_end_mask(attention_mask, agent_mask, tokens, end_of_action)
    return begins_utterance(decision_mask(agent_mask), ends)
