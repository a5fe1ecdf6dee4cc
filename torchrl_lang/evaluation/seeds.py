"""Results of several training seeds: mean, standard error and confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchrl_lang.evaluation.tables import format_columns

__all__ = ["SeedSummary", "format_seed_table", "over_seeds"]

# 97.5 % quantiles of Student's t distribution with 1 to 10 degrees of freedom.
_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


@dataclass(frozen=True)
class SeedSummary:
    """A figure of several training runs that differ in their seeds only."""

    name: str
    values: tuple[float, ...]
    """One figure for each seed, such as the mean return of its games."""
    mean: float
    error: float | None
    """Standard error of the mean over seeds; None for a single seed."""
    interval: tuple[float, float] | None
    """95 % confidence interval of the mean, by Student's t distribution; None for a single seed."""

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self)


def over_seeds(name: str, values: Sequence[float]) -> SeedSummary:
    """Summarize one figure of several training runs.

    The standard error includes that of the games, which differ or not, because every value has it.

    Args:
        name: in tables.
        values: one figure for each seed.

    Raises:
        ValueError: there is no value, or one is not finite.

    Examples:
        >>> from torchrl_lang.evaluation import over_seeds
        >>> summary = over_seeds("ILQL", [-1.5, -1.4, -1.6])
        >>> f"{summary.mean:.2f} {summary.error:.3f}", [round(bound, 2) for bound in summary.interval]
        ('-1.50 0.058', [-1.75, -1.25])
    """
    values = tuple(float(value) for value in values)
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"{name} needs at least one value, and only finite ones, got {list(values)}.")
    mean, number = statistics.fmean(values), len(values)
    if number == 1:
        return SeedSummary(name, values, mean, None, None)
    error = statistics.stdev(values) / math.sqrt(number)
    half = _quantile(number - 1) * error
    return SeedSummary(name, values, mean, error, (mean - half, mean + half))


def _quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # Cornish and Fisher's expansion, exact to three digits from 10 degrees of freedom on.
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def format_seed_table(rows: Sequence[SeedSummary], *, title: str = "player", digits: int = 2) -> str:
    """A plain-text table with one line per player: mean over seeds, its 95 % interval, and every seed's value.

    Args:
        rows: of any numbers of seeds.
        title: of the first column.
        digits: after the point.

    Examples:
        >>> from torchrl_lang.evaluation import format_seed_table, over_seeds
        >>> print(format_seed_table([over_seeds("BC", [-2.4, -2.6, -2.5]), over_seeds("ILQL", [-1.5])]))
        player   mean   95 % interval  seeds
        --------------------------------------------------
        BC      -2.50  -2.75 to -2.25  -2.40, -2.60, -2.50
        ILQL    -1.50               -  -1.50
    """
    cells = [(title, "mean", "95 % interval", "seeds")]
    for row in rows:
        interval = "-" if row.interval is None else f"{row.interval[0]:.{digits}f} to {row.interval[1]:.{digits}f}"
        seeds = ", ".join(f"{value:.{digits}f}" for value in row.values)
        cells.append((row.name, f"{row.mean:.{digits}f}", interval, seeds))
    return format_columns(cells, "<>><")
