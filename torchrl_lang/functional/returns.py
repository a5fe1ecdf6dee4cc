"""Returns over the decisions of a row: returns to go, lambda-returns, soft returns and returns as conditions."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_lang._checks import check_options
from torchrl_lang.functional.decisions import begins_utterance, shift_left, utterance_states
from torchrl_lang.functional.precision import scalar_like


def reverse_linear_scan(decay: Tensor, increment: Tensor, last: Tensor | None = None) -> Tensor:
    """Solve ``x[t] = increment[t] + decay[t] * x[t + 1]``, each ``[*B, T]``, from the right, with ``x[T] = last``.

    Uses recursive doubling: after ``k`` rounds each position has summed ``2**k`` steps, so a row of ``T`` tokens costs
    ``log2(T)`` vector operations instead of ``T``. Products of decays may underflow to zero, which is harmless because
    there is no division. ``last`` is ``[*B]``; None for zero.
    """
    if last is not None:  # append it as a column
        decay = torch.cat([decay, torch.zeros_like(decay[..., :1])], -1)
        increment = torch.cat([increment, last.to(increment.dtype).unsqueeze(-1)], -1)
        return reverse_linear_scan(decay, increment)[..., :-1]
    length = increment.shape[-1]
    step = 1
    while step < length:
        tail = torch.zeros_like(increment[..., :step])
        increment = increment + decay * torch.cat([increment[..., step:], tail], -1)
        decay = decay * torch.cat([decay[..., step:], tail], -1)
        step *= 2
    return increment


def td_target(reward: Tensor, next_value: Tensor, terminated: Tensor, gamma: Tensor | float) -> Tensor:
    """Compute the one-step target ``r + gamma (1 - d) V(s')``, all of shape ``[N]``, ``terminated`` bool.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.returns import td_target
        >>> td_target(torch.tensor([1.0, 1.0]), torch.tensor([4.0, torch.nan]), torch.tensor([False, True]), 0.5)
        tensor([3., 1.])
    """
    return reward + gamma * torch.where(terminated, torch.zeros_like(next_value), next_value)


def returns_to_go(reward: Tensor, decision: Tensor, gamma: Tensor | float) -> Tensor:
    """Discounted returns to go ``G_j = sum_{i >= j} gamma**(i - j) * r_i``, one discount per decision.

    Args:
        reward: float ``[*B, T]``, the reward of the decision at that position; ignored elsewhere.
        decision: bool ``[*B, T]``.
        gamma: discount.

    Returns:
        float ``[*B, T]``: ``G`` at decisions; elsewhere the return of the next decision.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import returns_to_go
        >>> reward = torch.tensor([0.0, 0.0, 0.0, 1.0])
        >>> decision = torch.tensor([True, True, False, True])
        >>> returns_to_go(reward, decision, 0.5)
        tensor([0.2500, 0.5000, 1.0000, 1.0000])
    """
    decay = torch.where(decision, scalar_like(gamma, reward), 1.0)
    return reverse_linear_scan(decay, torch.where(decision, reward, 0.0))


def lambda_returns(
    reward: Tensor, value: Tensor, bootstrap: Tensor, decision: Tensor, gamma: Tensor | float, lmbda: Tensor | float
) -> Tensor:
    """Lambda-returns, which interpolate between the estimate at each decision and the return that follows it.

    ``G_j = (1 - lambda) * value_j + lambda * (r_j + gamma * G_{j+1})``, where ``G`` after the last decision is the
    value of the bootstrap state. ``lambda = 0`` gives ``value``, ``lambda = 1`` the (bootstrapped) return to go.

    Args:
        reward: float ``[*B, T]``, the reward of the decision at that position; ignored elsewhere.
        value: float ``[*B, T]``, the estimate at each decision; ignored elsewhere.
        bootstrap: float ``[*B]``, the value after a row's last decision, zero if the task has terminated.
        decision: bool ``[*B, T]``.
        gamma: discount per decision.
        lmbda: weight of the return that follows, in ``[0, 1]``.

    Returns:
        float ``[*B, T]``: ``G`` at decisions; elsewhere the return of the next decision.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import lambda_returns
        >>> decision = torch.tensor([True, True, False])
        >>> lambda_returns(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([4.0, 2.0, 0.0]), torch.tensor(8.0), decision,
        ...                gamma=0.5, lmbda=0.5)
        tensor([2.8750, 3.5000, 8.0000])
    """
    gamma, lmbda = scalar_like(gamma, value), scalar_like(lmbda, value)
    decay = torch.where(decision, gamma * lmbda, 1.0)
    increment = torch.where(decision, (1 - lmbda) * value + lmbda * reward, 0.0)
    return reverse_linear_scan(decay, increment, bootstrap)


PathLevel = Literal["token", "utterance", "row"]
"""An action: one token, one utterance, or all that the agent writes in a row."""


def soft_returns(reward: Tensor, log_ratio: Tensor, bootstrap: Tensor, decision: Tensor, beta: float) -> Tensor:
    """Compute rewards to go less the divergence to go, ``sum_{i >= t} (r_i - beta l_i)``, ``[*B, T]``.

    With ``l = log pi(a | s) - log pi_ref(a | s)`` of the policy of highest return less ``beta`` times its divergence
    from the reference, this is the value of every state on every path where actions decide alone what follows (OREO,
    arXiv 2412.16145, eq. 7). ``bootstrap`` ``[*B]`` is the value after a row's last decision.
    """
    return lambda_returns(reward - beta * log_ratio, torch.zeros_like(reward), bootstrap, decision, 1.0, 1.0)


def action_log_ratio(log_ratio: Tensor, decision: Tensor, ends: Tensor, level: PathLevel) -> tuple[Tensor, Tensor]:
    """Compute the log-ratio of each whole action, at its first decision, and where actions begin, both ``[*B, T]``.

    ``log_ratio`` is that of the token written at each decision, ``ends`` marks the last decision of each utterance.
    """
    if level == "token":
        return log_ratio, decision
    closes = ends & decision if level == "utterance" else torch.zeros_like(decision)
    total = reverse_linear_scan((~closes).to(log_ratio.dtype), torch.where(decision, log_ratio, 0.0))
    if level == "utterance":  # its tokens stand side by side
        return total, begins_utterance(decision, ends)
    return total, decision & (decision.cumsum(-1) == 1)


ReturnMode = Literal["constant", "decremented"]
"""Which return a policy is conditioned on, see :func:`return_conditions`."""


class ReturnConditions(NamedTuple):
    """Returns at some positions of rows."""

    returns: Tensor
    """float64 ``[*B, T]``; to be read only where :attr:`mask` is True."""
    mask: Tensor
    """bool ``[*B, T]``: positions whose token carries a return."""


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
        end_of_action: id of the token that ends an utterance, see :func:`turn_end_mask`.
        continued: the agent writes the next token of each row, so the last real position is a state as well.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.returns import return_conditions
        >>> real, agent = torch.ones(1, 5, dtype=torch.bool), torch.tensor([[False, True, False, True, False]])
        >>> reward = torch.tensor([[0.0, 1.0, 0.0, 4.0, 0.0]])
        >>> found = return_conditions(real, agent, reward, "decremented")
        >>> found.mask.nonzero()[:, 1], found.returns[found.mask]
        (tensor([0, 2]), tensor([5., 4.], dtype=torch.float64))
    """
    check_options(mode=(mode, ("constant", "decremented")))
    received = torch.where(agent_mask, token_reward.double(), 0.0).cumsum(-1)
    target = received[..., -1:] if target is None else target.double()
    if mode == "constant":
        first = torch.arange(attention_mask.shape[-1], device=attention_mask.device) == 0
        return ReturnConditions(target.expand_as(received), attention_mask & first)
    states = utterance_states(attention_mask, agent_mask, tokens, end_of_action)
    if continued:
        states = states | (attention_mask & ~shift_left(attention_mask))
    return ReturnConditions(target - received, states)
