"""Returns over the decisions of a row: returns to go, lambda-returns and one-step targets."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lambda_returns", "returns_to_go", "reverse_linear_scan", "td_target"]


def reverse_linear_scan(decay: Tensor, increment: Tensor, last: Tensor | None = None) -> Tensor:
    """Solve ``x[t] = increment[t] + decay[t] * x[t + 1]`` from the right, with ``x[T] = last``.

    Uses recursive doubling: after ``k`` rounds each position has summed ``2**k`` steps, so a row of ``T`` tokens costs
    ``log2(T)`` vector operations instead of ``T``. Products of decays may underflow to zero, which is harmless because
    there is no division.

    Args:
        decay: float ``[*B, T]``.
        increment: float ``[*B, T]``.
        last: float ``[*B]``, the value after the row; None for zero.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import reverse_linear_scan
        >>> reverse_linear_scan(torch.full((3,), 0.5), torch.tensor([0.0, 0.0, 1.0]))
        tensor([0.2500, 0.5000, 1.0000])
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
    """One-step target ``r + gamma * (1 - d) * V(s')``, all of shape ``[N]``, ``terminated`` bool."""
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
    decay = torch.where(decision, torch.as_tensor(gamma, dtype=reward.dtype, device=reward.device), 1.0)
    return reverse_linear_scan(decay, torch.where(decision, reward, 0.0))


def lambda_returns(
    reward: Tensor,
    value: Tensor,
    bootstrap: Tensor,
    decision: Tensor,
    gamma: Tensor | float,
    lmbda: Tensor | float,
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
    gamma = torch.as_tensor(gamma, dtype=value.dtype, device=value.device)
    lmbda = torch.as_tensor(lmbda, dtype=value.dtype, device=value.device)
    decay = torch.where(decision, gamma * lmbda, 1.0)
    increment = torch.where(decision, (1 - lmbda) * value + lmbda * reward, 0.0)
    return reverse_linear_scan(decay, increment, bootstrap)
