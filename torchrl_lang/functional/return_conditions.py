"""The returns that a policy is conditioned on, and the positions of a row at which it reads them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.functional.advantages import turn_end_mask
from torchrl_lang.functional.decisions import decision_mask, shift_left
from torchrl_lang.functional.utterances import begins_utterance

__all__ = ["ReturnConditions", "ReturnMode", "return_conditions", "utterance_states"]

ReturnMode = Literal["constant", "decremented"]
"""Which return a policy is conditioned on, see :func:`return_conditions`."""


class ReturnConditions(NamedTuple):
    """Returns at some positions of rows."""

    returns: Tensor
    """float64 ``[*B, T]``; to be read only where :attr:`mask` is True."""
    mask: Tensor
    """bool ``[*B, T]``: positions whose token carries a return."""


def utterance_states(
    attention_mask: Tensor, agent_mask: Tensor, tokens: Tensor | None = None, end_of_action: int | None = None
) -> Tensor:
    """True at the position before the first token of each utterance, ``bool [*B, T]``.

    Utterances end as in :func:`~torchrl_lang.functional.turn_end_mask`, whose arguments these are: without
    ``end_of_action`` two utterances with nothing between them count as one.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import utterance_states
        >>> agent = torch.tensor([False, True, True, False, False, True])
        >>> utterance_states(torch.ones(6, dtype=torch.bool), agent).nonzero().flatten()
        tensor([0, 4])
    """
    ends = turn_end_mask(attention_mask, agent_mask, tokens, end_of_action)
    return begins_utterance(decision_mask(agent_mask), ends)


def return_conditions(
    attention_mask: Tensor,
    agent_mask: Tensor,
    token_reward: Tensor,
    mode: ReturnMode,
    *,
    target: Tensor | None = None,
    tokens: Tensor | None = None,
    end_of_action: int | None = None,
    continued: bool = False,
) -> ReturnConditions:
    """The return that each row is conditioned on, ``R`` in all, with ``r_t`` the reward of the token at ``t``.

    ``"constant"``: ``R`` at the first position (ILQL, arXiv 2206.11871, for its decision transformer).
    ``"decremented"``: the return to go ``R - sum_{t <= p} r_t`` at the state ``p`` of each utterance, the position
    before its first token (decision transformer, arXiv 2106.01345). Returns are not discounted.

    Args:
        attention_mask: bool ``[*B, T]``.
        agent_mask: bool ``[*B, T]``.
        token_reward: float ``[*B, T]``; those of the agent's tokens count.
        mode: ``"constant"`` or ``"decremented"``.
        target: float ``[*B, 1]``, ``R``; default the sum of the rewards that the row holds, also of a truncated row.
        tokens: int ``[*B, T]``, with ``end_of_action``.
        end_of_action: id of the token that ends an utterance, see :func:`utterance_states`.
        continued: the agent writes the next token of each row, so the last real position is a state as well.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import return_conditions
        >>> real, agent = torch.ones(1, 5, dtype=torch.bool), torch.tensor([[False, True, False, True, False]])
        >>> reward = torch.tensor([[0.0, 1.0, 0.0, 4.0, 0.0]])
        >>> found = return_conditions(real, agent, reward, "decremented")
        >>> found.mask.nonzero()[:, 1], found.returns[found.mask]
        (tensor([0, 2]), tensor([5., 4.], dtype=torch.float64))
    """
    one_of("mode", mode, ("constant", "decremented"))
    received = torch.where(agent_mask, token_reward.double(), 0.0).cumsum(-1)
    target = received[..., -1:] if target is None else target.double()
    if mode == "constant":
        first = torch.arange(attention_mask.shape[-1], device=attention_mask.device) == 0
        return ReturnConditions(target.expand_as(received), attention_mask & first)
    states = utterance_states(attention_mask, agent_mask, tokens, end_of_action)
    if continued:
        states = states | (attention_mask & ~shift_left(attention_mask))
    return ReturnConditions(target - received, states)
