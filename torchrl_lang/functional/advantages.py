"""Generalised advantage estimation over the decisions of a row: one clock inside an utterance, another across turns."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_lang.functional.decisions import decision_mask, shift_left
from torchrl_lang.functional.returns import reverse_linear_scan

__all__ = [
    "Advantages",
    "Bootstrap",
    "group_advantages",
    "standardized",
    "turn_end_mask",
    "two_clock_advantages",
    "with_known_values",
]

Bootstrap = Literal["first", "mean"]
"""What a turn is worth to the one before it: the value of its first decision, or the mean over its decisions."""


class Advantages(NamedTuple):
    """Estimates at the decisions, zero elsewhere."""

    advantage: Tensor
    """float ``[*B, T]``."""
    value_target: Tensor
    """float ``[*B, T]``: ``advantage + value``, what a value should regress on."""


def turn_end_mask(
    attention_mask: Tensor, action_mask: Tensor, tokens: Tensor | None = None, end_of_action: int | None = None
) -> Tensor:
    """True at the decisions that end an utterance, ``bool [*B, T]``: what the agent says next belongs to a later turn.

    The masks alone see an end where a token of the environment follows. Where the environment may stay silent, or a row
    ends with the agent's own token, the end-of-action token tells; without it such an utterance counts as going on.

    Args:
        attention_mask: bool ``[*B, T]``.
        action_mask: bool ``[*B, T]``.
        tokens: int64 ``[*B, T]``, with ``end_of_action``.
        end_of_action: id of the token that ends an utterance.

    Raises:
        ValueError: ``end_of_action`` came without ``tokens``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import turn_end_mask
        >>> agent = torch.tensor([False, True, True, False, True])
        >>> turn_end_mask(torch.ones(5, dtype=torch.bool), agent)
        tensor([False,  True, False, False, False])
        >>> turn_end_mask(torch.ones(5, dtype=torch.bool), agent, torch.tensor([3, 7, 1, 2, 1]), end_of_action=1)
        tensor([False,  True, False,  True, False])
    """
    decision = decision_mask(action_mask)
    environment_follows = shift_left(shift_left(attention_mask & ~action_mask))
    ends = decision & environment_follows
    if end_of_action is None:
        return ends
    if tokens is None:
        raise ValueError(f"end_of_action={end_of_action} is looked for in tokens: give tokens as well.")
    return ends | (decision & (shift_left(tokens) == end_of_action))


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
    """Generalised advantage estimation (GAE, arXiv 1506.02438, eq. 16) with two clocks.

    From one decision to the next a clock ticks once, whatever the environment says in between: with ``g = gamma`` and
    ``l = lmbda`` inside an utterance, with ``g = turn_gamma`` and ``l = turn_lmbda`` from the last token of an
    utterance to the next one::

        A_j = G_j - V_j,    G_j = r_j + g_j ((1 - l_j) B_j + l_j G_{j+1})

    ``B_j`` is the value that is bootstrapped from: that of the next decision, ``V_{j+1}``, but with
    ``bootstrap="mean"`` across turns the mean of the values of all decisions of the next utterance, which is steadier
    where values differ within an utterance. Behind a row's last decision ``G`` and ``B`` are ``last_value``. With equal
    clocks and ``"first"`` this is GAE over the row's decisions. With both lambdas 1 it is the discounted reward to go
    less the value; a clock whose lambda is 0 looks one tick ahead and no further.

    Args:
        reward: float ``[*B, T]``, the reward of the decision at that position; ignored elsewhere.
        value: float ``[*B, T]``, the value of each decision's state; ignored elsewhere.
        last_value: float ``[*B]``, what a row is worth after its last decision, zero where the task has ended.
        decision: bool ``[*B, T]``.
        turn_end: bool ``[*B, T]``: the decision is the last one of its utterance, see :func:`turn_end_mask`.
        gamma: discount inside an utterance.
        lmbda: trust in what follows, inside an utterance, in ``[0, 1]``.
        turn_gamma: discount across turns.
        turn_lmbda: trust across turns.
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
    if bootstrap not in ("first", "mean"):
        raise ValueError(f"bootstrap must be 'first' or 'mean', got {bootstrap!r}.")
    last_value = last_value.to(value.dtype)
    following = _next_value(value, last_value, decision)
    if bootstrap == "mean":
        following = torch.where(turn_end, _next_turn_mean(value, last_value, decision, turn_end), following)
    discount = _clock(turn_end, turn_gamma, gamma, value)
    trust = _clock(turn_end, turn_lmbda, lmbda, value)
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
    """Values with those that nobody computed, NaN, filled in by what follows: ``V_j = r_j + g_j V_{j+1}``.

    Such a decision has no temporal difference (with ``bootstrap="mean"`` at the end of a turn only nearly), so that its
    advantage is the decayed one of the next decision, and those before it see through it. For tokens that the policy
    did not choose: the certain end of an utterance that ran out of room, or another player's turn.

    Args:
        value: float ``[*B, T]``, NaN where it is not known.
        reward: and all others: as in :func:`two_clock_advantages`.
        last_value: float ``[*B]``.
        decision: bool ``[*B, T]``.
        turn_end: bool ``[*B, T]``.
        gamma: discount inside an utterance.
        turn_gamma: discount across turns.

    Returns:
        float ``[*B, T]``, zero where there is no decision.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import with_known_values
        >>> always, never = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
        >>> value, reward = torch.tensor([7.0, torch.nan, torch.nan]), torch.tensor([0.0, 1.0, 2.0])
        >>> with_known_values(value, reward, torch.tensor(4.0), always, never, gamma=0.5)
        tensor([7., 3., 4.])
    """
    unknown = decision & value.isnan()
    discount = _clock(turn_end, turn_gamma, gamma, value)
    decay = torch.where(decision, torch.where(unknown, discount, 0.0), 1.0)
    increment = torch.where(decision, torch.where(unknown, reward, value), 0.0)
    return torch.where(decision, reverse_linear_scan(decay, increment, last_value), 0.0)


def standardized(values: Tensor, counted: Tensor | None = None) -> Tensor:
    """Values less their mean, over their standard deviation, both over what counts; zero elsewhere.

    The deviation is the unbiased one, over ``n - 1``, as in ``tensor.std()`` and in TorchRL's losses without a mask,
    and at least 1e-6; with ``counted`` and without it alike. So the result depends a little on ``n``: of a batch that
    holds everything twice it is ``sqrt((2n - 1) / (2n - 2))`` times as large, about ``1 + 1 / (4n)``. A single value
    has no deviation and becomes 0, as values that are all alike do: there is nothing to prefer.

    Args:
        values: float, any shape.
        counted: bool, the same shape; None where all count.

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
    """How much better an episode went than others from the same start (GRPO, arXiv 2402.03300, sec. 4.1.2).

    ``A_i = (R_i - mean_g) / std_g`` over the episodes of the group ``g`` of ``i``; the deviation is the unbiased one,
    and at least 1e-6. Where all of a group went alike, or an episode is alone, there is nothing to prefer: 0.

    Args:
        returns: float ``[N]``.
        group: int64 ``[N]``, the start of each episode; groups may be of different sizes and in any order.
        scale: divide by the deviation. Without it a start where little can be won or lost weighs less (Dr. GRPO, arXiv
            2503.20783).

    Returns:
        float ``[N]``, one advantage for all tokens of an episode.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import group_advantages
        >>> group_advantages(torch.tensor([1.0, 5.0, 3.0, 5.0]), torch.tensor([7, 2, 7, 2]))
        tensor([-0.7071,  0.0000,  0.7071,  0.0000])
    """
    if returns.ndim != 1 or group.shape != returns.shape:
        raise ValueError(f"returns and group are [N] both, got {tuple(returns.shape)} and {tuple(group.shape)}.")
    _, which, size = group.unique(return_inverse=True, return_counts=True)
    size = size.to(returns.dtype)

    def total(values: Tensor) -> Tensor:
        return returns.new_zeros(size.shape).index_add(0, which, values)

    centred = returns - (total(returns) / size)[which]
    if not scale:
        return centred
    deviation = (total(centred.square()) / (size - 1).clamp_min(1)).sqrt()
    return centred / deviation.clamp_min(1e-6)[which]


def _clock(turn_end: Tensor, across: Tensor | float, inside: Tensor | float, like: Tensor) -> Tensor:
    """One number where a turn ends, another inside an utterance, ``[*B, T]``."""
    across, inside = (torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in (across, inside))
    return torch.where(turn_end, across, inside)


def _next_value(value: Tensor, last_value: Tensor, decision: Tensor) -> Tensor:
    """The value of the decision that follows each position, ``last_value`` where none does, ``[*B, T]``."""
    width = decision.shape[-1]
    place = torch.where(decision, torch.arange(width, device=decision.device), width)
    ahead = torch.cat([place[..., 1:], torch.full_like(place[..., :1], width)], -1)
    following = ahead.flip(-1).cummin(-1).values.flip(-1)
    return torch.cat([value, last_value.unsqueeze(-1)], -1).gather(-1, following)


def _next_turn_mean(value: Tensor, last_value: Tensor, decision: Tensor, turn_end: Tensor) -> Tensor:
    """At the end of each turn the mean value of the next one's decisions, ``last_value`` where none follows."""
    turn = turn_end.cumsum(-1) - turn_end.long()  # the number of the turn that each position belongs to
    none = value.new_zeros(*value.shape[:-1], value.shape[-1] + 1)
    total = none.scatter_add(-1, turn, torch.where(decision, value, 0.0))
    number = none.scatter_add(-1, turn, decision.to(value.dtype))
    mean = torch.where(number > 0, total / number.clamp_min(1), last_value.unsqueeze(-1))
    return mean.gather(-1, turn + 1)
