"""Generalised advantage estimation over the decisions of a row, with one discount inside utterances and one across."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_lang._checks import check_options, have_shapes
from torchrl_lang.functional.precision import scalar_like
from torchrl_lang.functional.returns import reverse_linear_scan

Bootstrap = Literal["first", "mean"]
"""Value of a turn that the turn before it bootstraps from: of its first decision, or the mean over its decisions."""


class Advantages(NamedTuple):
    """Advantages and value targets at the decisions, zero elsewhere."""

    advantage: Tensor
    """float ``[*B, T]``."""
    value_target: Tensor
    """float ``[*B, T]``: ``advantage + value``, the target of the value regression."""


def two_clock_advantages(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    decision: Tensor,
    turn_end: Tensor,
    *,
    gamma: Tensor | float = 1.0,
    lmbda: Tensor | float = 0.95,
    turn_gamma: Tensor | float = 0.99,
    turn_lmbda: Tensor | float = 0.95,
    bootstrap: Bootstrap = "first",
) -> Advantages:
    """Generalised advantage estimation (GAE, arXiv 1506.02438, eq. 16) with two discounts.

    One step leads from a decision to the next, however many tokens the environment writes in between. Steps inside an
    utterance use ``g = gamma`` and ``l = lmbda``, the step from the last token of an utterance to the next utterance
    uses ``g = turn_gamma`` and ``l = turn_lmbda``::

        A_j = G_j - V_j,    G_j = r_j + g_j ((1 - l_j) B_j + l_j G_{j+1})

    ``B_j`` is the bootstrapped value: that of the next decision, ``V_{j+1}``, or across turns with
    ``bootstrap="mean"`` the mean over all decisions of the next utterance, which has less variance if values differ
    within an utterance. After a row's last decision ``G`` and ``B`` are ``last_value``. With equal parameters inside
    and across turns and ``"first"`` this is GAE over the row's decisions. With both lambdas 1 the advantage is the
    discounted return to go minus the value; with a lambda of 0 it is the one-step TD error.

    Args:
        reward: float ``[*B, T]``, the reward of the decision at that position; ignored elsewhere.
        value: float ``[*B, T]``, the value of each decision's state; ignored elsewhere.
        last_value: float ``[*B]``, the value after a row's last decision, zero if the task has terminated.
        decision: bool ``[*B, T]``.
        turn_end: bool ``[*B, T]``: the decision is the last one of its utterance, see :func:`turn_end_mask`.
        gamma: discount inside an utterance.
        lmbda: GAE lambda inside an utterance, in ``[0, 1]``.
        turn_gamma: discount across turns.
        turn_lmbda: GAE lambda across turns.
        bootstrap: ``"first"`` or ``"mean"``.

    Returns:
        The :class:`Advantages`.

    Raises:
        ValueError: ``bootstrap`` is unknown.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import two_clock_advantages
        >>> decision = torch.tensor([True, True, False, True, False])
        >>> turn_end = torch.tensor([False, True, False, True, False])
        >>> reward, value = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 0.0, 4.0, 0.0])
        >>> two_clock_advantages(reward, value, torch.tensor(0.0), decision, turn_end,
        ...                      gamma=1.0, lmbda=1.0, turn_gamma=0.5, turn_lmbda=0.0).value_target
        tensor([3., 3., 0., 2., 0.])
    """
    check_options(bootstrap=(bootstrap, ("first", "mean")))
    last_value = last_value.to(value.dtype)
    following = _next_value(value, last_value, decision)
    if bootstrap == "mean":
        following = torch.where(turn_end, _next_turn_mean(value, last_value, decision, turn_end), following)
    discount = clock(turn_end, turn_gamma, gamma, value)
    trust = clock(turn_end, turn_lmbda, lmbda, value)
    decay = torch.where(decision, discount * trust, 1.0)
    increment = torch.where(decision, reward + discount * (1 - trust) * following, 0.0)
    target = torch.where(decision, reverse_linear_scan(decay, increment, last_value), 0.0)
    return Advantages(torch.where(decision, target - value, 0.0), target)


def with_known_values(
    value: Tensor,
    reward: Tensor,
    last_value: Tensor,
    decision: Tensor,
    turn_end: Tensor,
    *,
    gamma: Tensor | float = 1.0,
    turn_gamma: Tensor | float = 0.99,
) -> Tensor:
    """Replace NaN values, which were not computed, by ``V_j = r_j + g_j V_{j+1}``; zero where there is no decision.

    The TD error of such a decision is zero (with ``bootstrap="mean"`` at the end of a turn only approximately), so its
    advantage is the decayed advantage of the next decision. Use it for tokens that the policy did not choose, such as
    the forced end of an utterance of maximal length, or another player's turn. Arguments are those of
    :func:`two_clock_advantages`.
    """
    unknown = decision & value.isnan()
    discount = clock(turn_end, turn_gamma, gamma, value)
    decay = torch.where(decision, torch.where(unknown, discount, 0.0), 1.0)
    increment = torch.where(decision, torch.where(unknown, reward, value), 0.0)
    return torch.where(decision, reverse_linear_scan(decay, increment, last_value), 0.0)


def standardized(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Subtract the mean and divide by the standard deviation, both over the counted values; zero elsewhere.

    The standard deviation is unbiased (divides by ``n - 1``, as in ``tensor.std()`` and TorchRL's losses) and at least
    1e-6. So the result depends slightly on ``n``: if a batch contains everything twice it is
    ``sqrt((2n - 1) / (2n - 2))`` times as large, about ``1 + 1 / (4n)``. A single value and equal values become 0.

    Args:
        values: float, any shape.
        counted: bool of the same shape; None to count all values.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import standardized
        >>> standardized(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
        >>> standardized(torch.tensor([5.0]))
        tensor([0.])
    """
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    number = counted.sum()
    mean = torch.where(counted, values, 0.0).sum() / number.clamp_min(1)
    centred = torch.where(counted, values - mean, 0.0)
    deviation = (centred.square().sum() / (number - 1).clamp_min(1)).sqrt()
    return centred / deviation.clamp_min(1e-6)


def group_advantages(returns: Tensor, group: Tensor, *, scale: bool = True) -> Tensor:
    """Group-relative advantages of episodes that have the same start (GRPO, arXiv 2402.03300, sec. 4.1.2).

    ``A_i = (R_i - mean_g) / std_g`` over the episodes of the group ``g`` of ``i``. The standard deviation is unbiased
    and at least 1e-6, as in TorchRL's ``MCAdvantage(trajectory_return="sum")``. The advantage is 0 if a group has a
    single episode or equal returns.

    Args:
        returns: float ``[N]``.
        group: int64 ``[N]``, the start of each episode; groups may be of different sizes and in any order.
        scale: divide by the standard deviation. Without it, groups with similar returns have smaller advantages (Dr.
            GRPO, arXiv 2503.20783).

    Returns:
        float ``[N]``, one advantage for all tokens of an episode.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import group_advantages
        >>> group_advantages(torch.tensor([1.0, 5.0, 3.0, 5.0]), torch.tensor([7, 2, 7, 2]))
        tensor([-0.7071,  0.0000,  0.7071,  0.0000])
    """
    have_shapes(("returns", returns, (returns.numel(),)), ("group", group, (returns.numel(),)))
    _, which, size = group.unique(return_inverse=True, return_counts=True)
    size = size.to(returns.dtype)

    def total(values: Tensor) -> Tensor:
        return returns.new_zeros(size.shape).index_add(0, which, values)

    centred = returns - (total(returns) / size)[which]
    if not scale:
        return centred
    deviation = (total(centred.square()) / (size - 1).clamp_min(1)).sqrt()
    return centred / deviation.clamp_min(1e-6)[which]


def clock(turn_end: Tensor, across: Tensor | float, inside: Tensor | float, like: Tensor) -> Tensor:
    """``across`` where a turn ends, ``inside`` elsewhere, ``[*B, T]``."""
    return torch.where(turn_end, scalar_like(across, like), scalar_like(inside, like))


def _next_value(value: Tensor, last_value: Tensor, decision: Tensor) -> Tensor:
    """The value of the next decision after each position, ``last_value`` if there is none, ``[*B, T]``."""
    here_or_later = reverse_linear_scan((~decision).to(value.dtype), torch.where(decision, value, 0.0), last_value)
    return torch.cat([here_or_later[..., 1:], last_value.unsqueeze(-1)], -1)


def _next_turn_mean(value: Tensor, last_value: Tensor, decision: Tensor, turn_end: Tensor) -> Tensor:
    """At the end of each turn the mean value of the next turn's decisions, ``last_value`` if there is none."""
    turn = turn_end.cumsum(-1) - turn_end.long()  # the turn number of each position
    none = value.new_zeros(*value.shape[:-1], value.shape[-1] + 1)
    total = none.scatter_add(-1, turn, torch.where(decision, value, 0.0))
    number = none.scatter_add(-1, turn, decision.to(value.dtype))
    mean = torch.where(number > 0, total / number.clamp_min(1), last_value.unsqueeze(-1))
    return mean.gather(-1, turn + 1)
