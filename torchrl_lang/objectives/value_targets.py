"""What the Q and V of ILQL regress on: one-step, lambda and Monte-Carlo targets, with two discounts."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_lang.functional import lambda_returns, returns_to_go, td_target
from torchrl_lang.functional.advantages import two_clock_advantages
from torchrl_lang.objectives.base import TransitionBatch

__all__ = ["Clocks", "Target", "bootstrap_value", "qvalue_target", "value_target"]

Target = Literal["td", "mc", "lambda"]


class Clocks(NamedTuple):
    """Discount and lambda of the step after each decision, one number for all or ``[B, T]``."""

    gamma: Tensor | float
    lmbda: Tensor | float


def value_target(
    kind: Target, batch: TransitionBatch, qvalue: Tensor | None, next_value: Tensor, clocks: Clocks
) -> Tensor:
    """What V regresses on at each decision, float ``[N]``.

    With ``"td"`` the target Q of the taken tokens, ``qvalue`` ``[N]``; with ``"mc"`` the rewards to go; with
    ``"lambda"`` lambda-returns over the target Q, bootstrapped from V of the last successors, ``next_value`` ``[N]``.
    """
    if kind == "mc":
        reward = batch.next_reward.to(next_value.dtype)
        return returns_to_go(reward, batch.decision, clocks.gamma).flatten()[batch.place]
    assert qvalue is not None
    if kind == "td":
        return qvalue
    returns = lambda_returns(
        batch.next_reward,
        batch.at_decisions(qvalue),
        bootstrap_value(batch, next_value),
        batch.decision,
        clocks.gamma,
        clocks.lmbda,
    )
    return returns.flatten()[batch.place]


def qvalue_target(
    batch: TransitionBatch, value: Tensor, next_value: Tensor, gamma: Tensor | float, lmbda: float
) -> Tensor:
    """What Q regresses on at each decision, float ``[N]``: ``r + gamma V(s')``, or TD(lambda) over V.

    ``value`` and ``next_value`` are V of the decisions' states and of their successors, ``[N]``; ``gamma`` a number or
    ``[B, T]``. ``lmbda=0`` is the one-step target, 1 the rewards to go with a bootstrap for truncated rows.
    """
    if not lmbda:
        discount = gamma.flatten()[batch.place] if isinstance(gamma, Tensor) and gamma.ndim else gamma
        return td_target(batch.reward, next_value, batch.terminated, discount)
    found = two_clock_advantages(
        batch.next_reward,
        batch.at_decisions(value),
        bootstrap_value(batch, next_value),
        batch.decision,
        batch.decision,  # all steps have the discounts that ``gamma`` gives
        turn_gamma=gamma,
        turn_lmbda=lmbda,
    )
    return found.value_target.flatten()[batch.place]


def bootstrap_value(batch: TransitionBatch, next_value: Tensor) -> Tensor:
    """The value after each row's last decision, ``[B]``: V of the bootstrap state, zero where the task ended."""
    last = batch.last.nonzero().squeeze(-1)
    rows, width = batch.decision.shape
    bootstrap = next_value.new_zeros(rows).index_copy(0, batch.place[last] // width, next_value[last])
    return torch.where(batch.row_terminated, 0, bootstrap)
