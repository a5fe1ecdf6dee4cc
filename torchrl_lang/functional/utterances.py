"""The utterances of the agent in a row, computed from its masks, for losses with one value for each of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.functional.decisions import decision_mask, shift_left, shift_right

__all__ = ["UtteranceSpans", "begins_utterance", "find_utterances", "running_mean"]


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
        """The sum of each utterance's rewards, ``[N] -> [U]``."""
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
        >>> from torchrl_lang.functional import find_utterances, turn_end_mask
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
        row=row,
        position=position,
        state=state,
        end=end.nonzero(as_tuple=True)[1],
        last=is_bootstrap[state + 1],
        of_decision=number[decision],
    )


def begins_utterance(decision: Tensor, end: Tensor) -> Tensor:
    """True at decisions that do not continue the decision before, both bool ``[*B, T]``; ``end``s are not continued.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.utterances import begins_utterance
        >>> decision = torch.tensor([True, True, True, False, True])
        >>> begins_utterance(decision, torch.tensor([False, True, False, False, False]))
        tensor([ True, False,  True, False,  True])
    """
    return decision & ~shift_right(decision & ~end)


def running_mean(states: Tensor) -> Tensor:
    """The mean of the states up to each position, ``[*B, T, H] -> [*B, T, H]``, at least in float32.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import running_mean
        >>> running_mean(torch.tensor([[1.0], [3.0], [8.0]])).squeeze(-1)
        tensor([1., 2., 4.])
    """
    count = torch.arange(1, states.shape[-2] + 1, device=states.device)
    return states.to(torch.promote_types(states.dtype, torch.float32)).cumsum(-2) / count[:, None]
