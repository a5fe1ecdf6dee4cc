"""Advantages at the decisions of rows: generalised advantage estimation with values, and comparisons without."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_lang import _ranks
from torchrl_lang._checks import check_options, have_shapes
from torchrl_lang.functional.decisions import begins_utterance, decision_mask, shift_right
from torchrl_lang.functional.precision import scalar_like
from torchrl_lang.functional.random import random_index
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


def turn_advantages(
    reward: Tensor,
    value: Tensor,
    last_value: Tensor,
    decision: Tensor,
    turn_end: Tensor,
    *,
    gamma: Tensor | float = 0.99,
    lmbda: Tensor | float = 0.95,
) -> Advantages:
    """Generalised advantage estimation whose steps are turns, one value and one advantage each (arXiv 2512.17008).

    With ``R_k`` the sum of the rewards of turn ``k`` and ``V_k`` the value before its first token::

        A_k = G_k - V_k,    G_k = R_k + gamma ((1 - lambda) V_{k+1} + lambda G_{k+1})

    Arguments are those of :func:`two_clock_advantages`, with ``gamma`` and ``lmbda`` across turns; of the values only
    those of first decisions are read. The :class:`Advantages` of a turn stand at each of its decisions.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import turn_advantages
        >>> decision = torch.tensor([True, True, False, True, False])
        >>> turn_end = torch.tensor([False, True, False, True, False])
        >>> reward, value = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0]), torch.tensor([1.0, 9.0, 0.0, 4.0, 0.0])
        >>> turn_advantages(reward, value, torch.tensor(0.0), decision, turn_end, gamma=0.5, lmbda=0.0).advantage
        tensor([ 2.,  2.,  0., -2.,  0.])
    """
    clocks: dict[str, Any] = {"gamma": 1.0, "lmbda": 1.0, "turn_gamma": gamma, "turn_lmbda": lmbda}
    found = two_clock_advantages(reward, value, last_value, decision, turn_end, **clocks)
    return Advantages(*(over_turns(each, decision, turn_end) for each in found))


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
        >>> from torchrl_lang.functional.advantages import standardized
        >>> standardized(torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False]))
        tensor([-0.7071,  0.7071,  0.0000])
        >>> standardized(torch.tensor([5.0]))
        tensor([0.])
    """
    counted = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    number = _ranks.total(counted.sum())
    centred = torch.where(counted, values, 0.0)
    for _ in range(2):  # the first mean is rounded, which equal values would show
        centred = torch.where(counted, centred - _ranks.total(centred.sum()) / number.clamp_min(1), 0.0)
    deviation = (_ranks.total(centred.square().sum()) / (number - 1).clamp_min(1)).sqrt()
    return centred / deviation.clamp_min(1e-6)


def group_advantages(
    returns: Tensor, group: Tensor, *, scale: bool = True, baseline: Literal["all", "others"] = "all"
) -> Tensor:
    """Group-relative advantages of episodes that have the same start.

    Over the ``n`` episodes of the group of ``i``, those of GRPO (``scale=True``), Dr. GRPO (``scale=False``) and RLOO
    (``scale=False, baseline="others"``) are::

        A_i = (R_i - mean_j R_j) / std_j R_j     (arXiv 2402.03300, sec. 4.1.2)
        A_i = R_i - mean_j R_j     (arXiv 2503.20783)
        A_i = R_i - 1 / (n - 1) sum_{j != i} R_j     (arXiv 2402.14740)

    The standard deviation is unbiased and at least 1e-6, as in TorchRL's ``MCAdvantage(trajectory_return="sum")``. The
    advantage is 0 if a group has a single episode or equal returns.

    Args:
        returns: float ``[N]``.
        group: int64 ``[N]``, the start of each episode; groups may be of different sizes and in any order.
        scale: divide by the standard deviation. Without it, groups with similar returns have smaller advantages.
        baseline: the mean over ``"all"`` episodes of the group, or over the ``"others"``, which does not depend on the
            episode itself and is ``n / (n - 1)`` times as far from it.

    Returns:
        float ``[N]``, one advantage for all tokens of an episode.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import group_advantages
        >>> group_advantages(torch.tensor([1.0, 5.0, 3.0, 5.0]), torch.tensor([7, 2, 7, 2]))
        tensor([-0.7071,  0.0000,  0.7071,  0.0000])
    """
    have_shapes(("returns", returns, (returns.numel(),)), ("group", group, (returns.numel(),)))
    check_options(baseline=(baseline, ("all", "others")))
    _, which, size = group.unique(return_inverse=True, return_counts=True)
    size = size.to(returns.dtype)

    def total(values: Tensor) -> Tensor:
        return returns.new_zeros(size.shape).index_add(0, which, values)

    centred = returns
    for _ in range(2):  # the first mean is rounded, which equal returns would show
        centred = centred - (total(centred) / size)[which]
    others = (size - 1).clamp_min(1)
    deviation = (total(centred.square()) / others).sqrt().clamp_min(1e-6)
    if baseline == "others":
        centred = centred * (size / others)[which]
    return centred / deviation[which] if scale else centred


def state_advantages(
    returns: Tensor, group: Tensor, state: Tensor, decision: Tensor, turn_end: Tensor, *, scale: bool = True
) -> Tensor:
    """Compare the turns of a group that begin in the same state (GiGPO's steps, arXiv 2505.10978, eq. 6 and 7).

    With ``G_k`` the return from turn ``k`` on, over all turns ``l`` of the group in the state of ``k``::

        S_k = (G_k - mean_l G_l) / std_l G_l

    It is 0 for a state in which only one turn begins. GiGPO adds it, weighted, to the advantage of the row.

    Args:
        returns: float ``[B, T]``, the return from each decision on, such as of :func:`returns_to_go`.
        group: int64 ``[B]``, the start of each row.
        state: int64 ``[B, T]``, the state of each decision's turn, as of :func:`turn_states`.
        decision: bool ``[B, T]``.
        turn_end: bool ``[B, T]``: the decision is the last one of its utterance, see :func:`turn_end_mask`.
        scale: divide by the standard deviation, see :func:`group_advantages`.

    Returns:
        float ``[B, T]``, that of a turn at each of its decisions, zero elsewhere.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import state_advantages
        >>> decision = torch.tensor([[True, False, True], [True, False, True]])
        >>> returns, state = torch.tensor([[1.0, 0.0, 1.0], [3.0, 0.0, 3.0]]), torch.tensor([[7, 0, 8], [7, 0, 9]])
        >>> state_advantages(returns, torch.tensor([0, 0]), state, decision, decision, scale=False)
        tensor([[-1.,  0.,  0.],
                [ 1.,  0.,  0.]])
    """
    begin = begins_utterance(decision, turn_end)
    same = random_index(group[:, None], state, 2**62)[begin]  # a hash of both
    compared = group_advantages(returns[begin], same, scale=scale)
    return over_turns(torch.zeros_like(returns).masked_scatter(begin, compared), decision, turn_end)


def turn_states(
    tokens: Tensor, agent_mask: Tensor, turn_end: Tensor, *, anchor: Literal["prefix", "observation"] = "prefix"
) -> Tensor:
    """Number the state in which the turn of each decision begins: a hash, equal for equal texts.

    Args:
        tokens: int ``[*B, T]``.
        agent_mask: bool ``[*B, T]``.
        turn_end: bool ``[*B, T]``, see :func:`turn_end_mask`.
        anchor: the text: ``"prefix"``, the row so far, or ``"observation"``, the environment's last text, without the
            token that begins a row. Turns with the same observation, which arXiv 2505.10978 compares, may differ in
            what happened before.

    Returns:
        int64 ``[*B, T]``, zero where there is no decision.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import turn_end_mask
        >>> from torchrl_lang.functional.advantages import turn_states
        >>> tokens = torch.tensor([[1, 5, 2, 6], [1, 7, 2, 6]])
        >>> real, agent = torch.ones(2, 4, dtype=torch.bool), torch.tensor([[False, True, False, True]]).expand(2, 4)
        >>> rows = tokens, agent, turn_end_mask(real, agent)
        >>> [turn_states(*rows, anchor=anchor)[:, [0, 2]].unique().numel() for anchor in ("prefix", "observation")]
        [3, 2]
    """
    check_options(anchor=(anchor, ("prefix", "observation")))
    place = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
    start, own = torch.zeros_like(place), torch.ones_like(agent_mask)
    if anchor == "observation":
        own = ~agent_mask & (place > 0)  # the first token of a row marks its beginning
        start = torch.where(own & ~shift_right(own), place, 0).cummax(-1).values
    # Sums of the hashes of tokens at their places: their differences are hashes of the texts between.
    total = torch.where(own, random_index(tokens.long(), place - start, 2**62), 0).cumsum(-1)
    return over_turns(total - shift_right(total).gather(-1, start), decision_mask(agent_mask), turn_end)


def over_turns(values: Tensor, decision: Tensor, turn_end: Tensor) -> Tensor:
    """The value of each turn's first decision at all of its decisions, ``[*B, T]``, zero elsewhere."""
    begin = begins_utterance(decision, turn_end)
    place = torch.arange(values.shape[-1], device=values.device)
    return torch.where(decision, values.gather(-1, torch.where(begin, place, 0).cummax(-1).values), 0)


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
