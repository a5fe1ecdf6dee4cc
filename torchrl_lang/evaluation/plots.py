"""Plots of training runs and games as PNG files. Needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_lang._checks import needs_extra
from torchrl_lang._files import parse_rows, read_text
from torchrl_lang.evaluation.metrics import Summary

Columns = Mapping[str, Sequence[float]]
"""The log of a run: one list of numbers per column, all of one length, with NaN where nothing was logged."""


def read_columns(path: str | Path) -> dict[str, list[float]]:
    r"""Read a CSV log into columns; empty cells become NaN. An incomplete last line, as after a crash, is ignored.

    Raises:
        FileError: the file is missing or damaged.

    Examples:
        >>> import tempfile, pathlib
        >>> from torchrl_lang.evaluation.plots import read_columns
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "log.csv")
        ...     _ = path.write_text("step,loss,return\n1,0.5,\n2,0.25,-3.0\n")
        ...     read_columns(path)
        {'step': [1.0, 2.0], 'loss': [0.5, 0.25], 'return': [nan, -3.0]}
    """
    remedy = "give the log of a run, or repair that line"
    text = read_text(path, remedy=remedy)
    names, rows = parse_rows(text[: text.rfind("\n") + 1], path, remedy=remedy)
    return {name: [float(row.get(name, math.nan)) for _, row in rows] for name in names}


def plot_guess_histogram(
    path: str | Path, summaries: Sequence[Summary], *, title: str = "", turns: str = "turns"
) -> Path:
    """Plot the share of games that policies won in each number of turns, and the share that they lost.

    Args:
        path: the PNG file; its folder is created if missing.
        summaries: one :func:`~torchrl_lang.evaluation.summarize` per policy.
        title: title of the figure.
        turns: what the task calls its turns, such as ``"guesses"``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    most = max((number for summary in summaries for number in summary.guesses), default=1)
    labels = [*map(str, range(1, most + 1)), "lost"]
    width = 0.8 / len(summaries)
    figure = new_figure(width=max(5.2, 0.35 * len(labels) * len(summaries)), height=3.8)
    axes = figure.add_subplot()
    for order, summary in enumerate(summaries):
        counts = [summary.guesses.get(number, 0) for number in range(1, most + 1)] + [summary.lost]
        place = [index + (order - (len(summaries) - 1) / 2) * width for index in range(len(labels))]
        axes.bar(place, [100 * count / summary.games for count in counts], width, label=summary.name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(xlabel=f"{turns} until won", ylabel="% of games")
    tidy(axes)
    return save_figure(figure, path, title)


def draw_run(axes: Any, name: str, log: Columns, x: str, panel: str) -> None:
    """Draw one quantity of a run, with a band of one standard error if it is logged."""
    # Columns that are not logged at every step have gaps; the line connects their values.
    error = log.get(f"{panel}_error", [math.nan] * len(log[x]))
    points = [point for point in zip(log[x], log[panel], error, strict=True) if not math.isnan(point[1])]
    steps, values, errors = ([point[i] for point in points] for i in range(3))
    (line,) = axes.plot(steps, values, linewidth=1.5, marker="o" if len(points) < 3 else None, label=name)
    if any(not math.isnan(e) for e in errors):
        low, high = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color(), linewidth=0)


def new_figure(*, width: float, height: float) -> Any:
    """A figure of a size in inches that is written as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # A Figure without pyplot: no window, no global state, and always the Agg renderer.
    with needs_extra("A plot", "plots"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Any) -> None:
    """Remove needless lines of axes, and add a legend if there is something to name."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small")


def save_figure(figure: Any, path: str | Path, title: str) -> Path:
    """Write a figure as PNG with a title; its folder is created if missing."""
    if title:
        figure.suptitle(title)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path
