"""Report of in-context evaluations: curves with confidence bands, regret, the worst task, a test of improvement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_lang._checks import Count, checked, have_shapes
from torchrl_lang.evaluation import SeedSummary, over_seeds

_EXACT = 14


@dataclass(frozen=True)
class PairedTest:
    """Whether one of two paired figures is larger; see :func:`paired_test`."""

    pairs: int
    difference: float
    """Mean difference."""
    wins: float
    """Share of the pairs with a positive difference."""
    p_value: float
    """One-sided: the probability of a mean difference at least as large if signs were random."""


@dataclass(frozen=True)
class TaskResult:
    """One task, over seeds and streams."""

    task: int
    first: float
    """Mean return of the first episode."""
    last: float
    """Mean return of the last episodes."""
    optimal: float
    never_found: float
    """Share of the streams that never earned anything."""

    @property
    def share(self) -> float | None:
        """Share of the optimum in the last episodes; 1 where nothing can be earned, None of a negative optimum."""
        if self.optimal > 0:
            return self.last / self.optimal
        return 1.0 if self.optimal == self.last == 0 else None


@dataclass(frozen=True)
class InContextReport:
    """Returns by episode of one policy, over tasks, streams and training seeds; see :func:`in_context_report`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import in_context_report
        >>> returns = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 2, 5, 4)  # of 1 seed, 2 tasks and 5 streams
        >>> report = in_context_report("AD", returns, torch.tensor([4.0, 5.0]), last=1)
        >>> report.mean, report.gain, report.worst_task.share
        ((1.0, 2.0, 3.0, 4.0), 4.0, 0.8)
        >>> report.regret  # the mean optimum is 4.5
        (3.5, 6.0, 7.5, 8.0)
    """

    name: str
    mean: tuple[float, ...]
    """Mean return of each episode."""
    low: tuple[float, ...]
    """Lower end of its 95 % band, by the bootstrap over tasks and seeds."""
    high: tuple[float, ...]
    optimal: float
    """Mean optimal return of the tasks."""
    regret: tuple[float, ...]
    """Difference to the optimum, summed over the episodes up to each; mean over streams, tasks and seeds."""
    regret_low: tuple[float, ...]
    """Lower end of its 95 % band."""
    regret_high: tuple[float, ...]
    total_regret: SeedSummary
    """Regret of all episodes, by seed."""
    last: int
    """Number of the last episodes that the following figures are means of."""
    share_of_optimal: SeedSummary | None
    """Mean return of the last episodes over the mean optimal return, by seed; None where that is not positive."""
    never_found: float
    """Share of the streams that never earned anything, in any episode."""
    late_beats_early: PairedTest
    """The last against as many first episodes, paired by task."""
    tasks: tuple[TaskResult, ...]

    @property
    def gain(self) -> float | None:
        """Mean return of the last episodes over that of the first one; None where that is not positive."""
        late = sum(self.mean[-self.last :]) / self.last
        return late / self.mean[0] if self.mean[0] > 0 else None

    @property
    def worst_task(self) -> TaskResult:
        """The task with the smallest share of its optimal return; if one has none, that furthest below its optimum."""
        shares = [result.share for result in self.tasks if result.share is not None]
        if len(shares) == len(self.tasks):
            return self.tasks[shares.index(min(shares))]
        return max(self.tasks, key=lambda result: result.optimal - result.last)

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {**asdict(self), "gain": self.gain, "worst_task": asdict(self.worst_task)}


@checked
def in_context_report(
    name: str,
    returns: Tensor,
    optimal: Tensor,
    *,
    tasks: Sequence[int] | Tensor | None = None,
    last: Count = 3,
    seed: int = 0,
) -> InContextReport:
    """Summarize the returns of :func:`~torchrl_lang.algorithm_distillation.evaluate_in_context`.

    Args:
        name: of the policy, in tables.
        returns: float ``[seeds, tasks, streams, K]``: several training seeds on the same tasks.
        optimal: float ``[tasks]``: the optimal returns. Shares of them are reported if their mean is positive.
        tasks: numbers of the tasks; default 0, 1, ...
        last: number of the last episodes to summarize; ``K`` is at least twice as many.
        seed: seed of the bootstrap.

    Raises:
        ValueError: shapes do not go together, returns are not finite, or there are too few episodes.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import RandomPolicy, evaluate_in_context, in_context_report
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, task=torch.arange(9)[:, None], batch_size=[9, 50])
        >>> returns = evaluate_in_context(env, RandomPolicy(5), episodes=6)
        >>> report = in_context_report("random", returns[None], env.optimal_return()[:, 0])
        >>> report.late_beats_early.p_value > 0.01, report.share_of_optimal.mean < 0.3
        (True, True)
    """
    if returns.ndim != 4 or not returns.numel() or returns.shape[3] < 2 * last:
        expected = f"[seeds, tasks, streams, episodes] with 2 * last = {2 * last} episodes or more"
        raise ValueError(f"returns must have shape {expected}, got {list(returns.shape)}.")
    n_tasks = returns.shape[1]
    numbers = torch.arange(n_tasks) if tasks is None else torch.as_tensor(tasks)
    have_shapes(("optimal", optimal, (n_tasks,)), ("tasks", numbers, (n_tasks,)))
    for kind, values in (("returns", returns), ("optimal", optimal)):
        if not (is_finite := values.isfinite()).all():
            raise ValueError(f"{kind} must be finite, got {values[~is_finite][0]}.")
    returns, optimal = returns.double().cpu(), optimal.double().cpu()
    late, early = returns[..., -last:].mean(-1), returns[..., :last].mean(-1)  # [seeds, tasks, streams]
    never = (returns == 0).all(-1).double()
    by_task = (numbers, returns[..., 0].mean((0, 2)), late.mean((0, 2)), optimal, never.mean((0, 2)))
    low, high = bootstrap_band(returns.mean(2), seed=seed)
    regret = (optimal[:, None] - returns.mean(2)).cumsum(-1)  # [seeds, tasks, K]
    regret_low, regret_high = bootstrap_band(regret, seed=seed)
    shares = (late.mean((1, 2)) / optimal.mean()).tolist() if optimal.mean() > 0 else None
    return InContextReport(
        name=name,
        mean=tuple(returns.mean((0, 1, 2)).tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        optimal=float(optimal.mean()),
        regret=tuple(regret.mean((0, 1)).tolist()),
        regret_low=tuple(regret_low.tolist()),
        regret_high=tuple(regret_high.tolist()),
        total_regret=over_seeds(name, regret[..., -1].mean(1).tolist()),
        last=last,
        share_of_optimal=None if shares is None else over_seeds(name, shares),
        never_found=float(never.mean()),
        late_beats_early=paired_test(late.mean((0, 2)), early.mean((0, 2)), seed=seed),
        tasks=tuple(TaskResult(*row) for row in zip(*(column.tolist() for column in by_task), strict=True)),
    )


def bootstrap_band(values: Tensor, *, resamples: int = 2000, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The 95 % band of the mean over seeds and tasks, by the bootstrap.

    Seeds and tasks are drawn with replacement, each on its own: a seed that is drawn twice counts twice on every task
    (Owen 2007, "The pigeonhole bootstrap"). With one seed the band shows the tasks' spread only.

    Args:
        values: float ``[seeds, tasks, K]``.
        resamples: number of draws.
        seed: seed of the draws.

    Returns:
        The 2.5 % and the 97.5 % quantile, each ``[K]``.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for n in values.shape[:2]:
        drawn = torch.randint(n, (resamples, n), generator=generator)
        ones = torch.ones(drawn.shape, dtype=torch.float64)
        weights.append(torch.zeros_like(ones).scatter_add_(1, drawn, ones) / n)
    means = torch.einsum("rs,rt,stk->rk", *weights, values.double().cpu())
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
    return low, high


def paired_test(larger: Tensor, smaller: Tensor, *, draws: int = 10_000, seed: int = 0) -> PairedTest:
    r"""Test by random signs whether ``larger`` is larger than ``smaller`` (Fisher's randomization test).

    If the pairs did not differ, each difference :math:`d_i` could as well have had the other sign. The p-value is the
    share of sign vectors :math:`s \in \{-1, 1\}^n` with :math:`\sum_i s_i d_i \ge \sum_i d_i`: of all :math:`2^n` up to
    14 pairs, otherwise of ``draws`` random ones and the observed one.

    Args:
        larger: float ``[n]``.
        smaller: float ``[n]``, of the same pairs.
        draws: number of random sign vectors.
        seed: of the random signs.

    Raises:
        ValueError: the figures are not two vectors of one length, or not finite.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import paired_test
        >>> paired_test(torch.tensor([3.0, 2.0, 5.0]), torch.tensor([1.0, 1.0, 1.0]))
        PairedTest(pairs=3, difference=2.3333333333333335, wins=1.0, p_value=0.125)
    """
    difference = (larger - smaller).double().cpu()
    if larger.ndim != 1 or larger.shape != smaller.shape or not len(larger) or not difference.isfinite().all():
        found = f"shapes {list(larger.shape)} and {list(smaller.shape)} with the differences {difference.tolist()}"
        raise ValueError(f"A paired test needs two vectors of one length with finite numbers, got {found}.")
    n = len(difference)
    if n <= _EXACT:
        flips = (torch.arange(1 << n)[:, None] >> torch.arange(n)) & 1
    else:
        flips = torch.randint(2, (draws, n), generator=torch.Generator().manual_seed(seed))
    # Sums in another order differ in their last digits: an equal one must count.
    observed = difference.sum() - 1e-9 * difference.abs().sum()
    count = int(((1 - 2 * flips).double() @ difference >= observed).sum())
    p_value = count / len(flips) if n <= _EXACT else (count + 1) / (draws + 1)
    return PairedTest(n, float(difference.mean()), float((difference > 0).double().mean()), p_value)
