"""Tables of policies and of training seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchrl_lang.evaluation.metrics import Summary


def cell(value: float | None, error: float | None = None, *, digits: int = 3, scale: int = 1, unit: str = "") -> str:
    """A figure, with its standard error if it has one; "-" if it was not measured."""
    if value is None:
        return "-"
    return f"{scale * value:.{digits}f}{'' if error is None else f' ± {scale * error:.{digits}f}'}{unit}"


def _mean_turns_to_win(summary: Summary) -> float | None:
    won = sum(summary.guesses.values())
    return sum(turns * count for turns, count in summary.guesses.items()) / won if won else None


_PERCENT: Any = {"digits": 1, "scale": 100, "unit": " %"}
_RETURN = "mean sum of a game's rewards ± its standard error"
_MOVED = "how far values move a sampled policy from the same model without them, nats a token"

_COLUMNS: dict[str, tuple[str, Callable[[Summary], str]]] = {
    "player": ("who played", lambda s: s.name),
    "games": ("number of games", lambda s: str(s.games)),
    "return": (_RETURN, lambda s: cell(s.mean_return, s.return_error, digits=2)),
    "won": ("share of games won ± its standard error", lambda s: cell(s.win_rate, s.win_error, **_PERCENT)),
    "turns": ("mean number of {turns} of a game, all games", lambda s: cell(s.mean_turns, digits=2)),
    "turns won": ("likewise, games won alone", lambda s: cell(_mean_turns_to_win(s), digits=2)),
    "invalid": ("share of {turns} that were invalid", lambda s: cell(s.invalid_rate, **_PERCENT)),
    "KL/token": (_MOVED, lambda s: cell(s.kl_per_token)),
    "entropy": ("mean entropy of the policy, nats a token", lambda s: cell(s.entropy)),
}
"""For each title the meaning of the column, and the function that formats a summary's cell."""


def format_table(rows: Sequence[Summary]) -> str:
    """A plain-text table with one line per policy; :func:`format_legend` describes its columns.

    Columns without values are left out.

    Examples:
        >>> from torchrl_lang.evaluation import Summary, format_table
        >>> bc = Summary("BC", 1000, -4.06, 0.06, 0.71, 0.0143, 4.8, {3: 300, 4: 410}, 290)
        >>> ilql = Summary("ILQL beta 4", 1000, -2.41, 0.05, 0.91, 0.0091, 3.5, {3: 910}, 90)
        >>> print(format_table([bc, ilql]))
        player       games        return           won  turns  turns won
        ----------------------------------------------------------------
        BC            1000  -4.06 ± 0.06  71.0 ± 1.4 %   4.80       3.58
        ILQL beta 4   1000  -2.41 ± 0.05  91.0 ± 0.9 %   3.50       3.00
    """
    columns = [[title, *cells] for title, (_, cells) in _shown(rows).items()]
    return format_columns(list(zip(*columns, strict=True)), "<" + ">" * (len(columns) - 1))


def format_legend(rows: Sequence[Summary], *, turns: str = "turns", metrics: Mapping[str, str] | None = None) -> str:
    """Explain the columns of :func:`format_table`, a line for each.

    Args:
        rows: of the table.
        turns: what the task calls its turns.
        metrics: meanings of the task's own metrics by name.

    Examples:
        >>> from torchrl_lang.evaluation import Summary
        >>> from torchrl_lang.evaluation.tables import format_legend
        >>> print(format_legend([Summary("BC", 1, -4.0, None, 0.0, None, 6.0)], turns="guesses"))
        player  who played
        games   number of games
        return  mean sum of a game's rewards ± its standard error
        won     share of games won ± its standard error
        turns   mean number of guesses of a game, all games
    """
    meanings = {title: text.format(turns=turns) for title, (text, _) in _shown(rows).items()}
    meanings |= {name: text for name, text in (metrics or {}).items() if name in meanings}
    width = max(map(len, meanings))
    return "\n".join(f"{title:{width}}  {text}" for title, text in meanings.items())


def _shown(rows: Sequence[Summary]) -> dict[str, tuple[str, list[str]]]:
    """The meaning and the cells of each column with a value for any row."""
    cells = {title: (text, [show(row) for row in rows]) for title, (text, show) in _COLUMNS.items()}
    for name in dict.fromkeys(name for row in rows for name in row.metrics):
        cells[name] = "a metric of the task, its mean over games", [cell(row.metrics.get(name)) for row in rows]
    return {title: each for title, each in cells.items() if set(each[1]) != {"-"}}


def format_columns(lines: Sequence[Sequence[str]], sides: str) -> str:
    """Lines of cells as text with aligned columns, and a rule below the first line.

    Args:
        lines: the titles of the columns, then the rows.
        sides: ``<`` or ``>`` for each column, to which its cells are aligned.

    Examples:
        >>> from torchrl_lang.evaluation.tables import format_columns
        >>> print(format_columns([("player", "return"), ("BC", "-4"), ("ILQL", "-2.5")], "<>"))
        player  return
        --------------
        BC          -4
        ILQL      -2.5
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)] for line in lines)
    texts = ["  ".join(row).rstrip() for row in rows]
    return "\n".join([texts[0], "-" * max(map(len, texts)), *texts[1:]])


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
