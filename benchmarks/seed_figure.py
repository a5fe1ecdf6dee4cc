"""Means over training seeds with their intervals, as a picture. Needs matplotlib, the extra ``plots``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import COLOURS, save
from torchrl_lang.evaluation import SeedSummary


def draw_intervals(path: Path, title: str, panels: Mapping[str, Sequence[SeedSummary]]) -> None:
    """A panel for each dataset, a line for each player: its mean, its interval and the seeds' values."""
    picture, every = _figure(title, list(panels), height=1.2 + 0.32 * max(map(len, panels.values())), grid="x")
    for axes, players in zip(every, panels.values(), strict=True):
        for height, player in enumerate(reversed(players)):
            if player.interval is not None:
                axes.plot(player.interval, [height, height], color="#1b6ca8", linewidth=1.6)
            axes.plot(player.values, [height] * len(player.values), "|", color="0.45", markersize=8)
            axes.plot([player.mean], [height], "o", color="#1b6ca8", markersize=5)
        axes.set_yticks(range(len(players)), [player.name for player in reversed(players)])
    save(picture, path)


def draw_curves(
    path: Path, title: str, steps: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[SeedSummary]]]
) -> None:
    """A panel for each measured quantity, a curve for each method: the mean over seeds, within one standard error."""
    picture, every = _figure(title, list(panels), height=3.4, grid="y")
    for axes, methods in zip(every, panels.values(), strict=True):
        for colour, (method, points) in zip(COLOURS[1:], methods.items(), strict=False):
            mean = [point.mean for point in points]
            error = [point.error or 0.0 for point in points]
            band = [[m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1)]
            axes.fill_between(steps, *band, color=colour, alpha=0.2, linewidth=0)
            axes.plot(steps, mean, color=colour, linewidth=1.6, label=method)
        axes.set(xlabel="training steps", ylim=(-0.03, 1.03))
    every[-1].legend(frameon=False, fontsize=9)
    save(picture, path)


def draw_learning(path: Path, title: str, methods: Mapping[str, Sequence[Mapping[str, Sequence[float]]]]) -> None:
    """Returns against games and against minutes, both logarithmic: a line for each method, the best at the end first.

    A line is the mean over the runs, and over the last eight iterations.
    """
    picture, every = _figure(title, ["games", "minutes"], height=5.2, grid="y")
    lines = {method: _mean_curve(runs) for method, runs in methods.items()}
    for axes, x in zip(every, ("games", "minutes"), strict=True):
        for number, method in enumerate(sorted(lines, key=lambda name: -lines[name]["return"][-1])):
            style: Any = {"color": f"C{number % 10}", "linestyle": "-" if number < 10 else "--"}
            axes.plot(lines[method][x], lines[method]["return"], linewidth=1.4, label=method, **style)
        axes.set(xlabel=x, xscale="log")
    every[-1].legend(frameon=False, fontsize=8)
    save(picture, path)


def _mean_curve(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    means = {name: [fmean(values) for values in zip(*(run[name] for run in runs), strict=False)] for name in runs[0]}
    means["return"] = [fmean(means["return"][max(0, end - 8) : end]) for end in range(1, len(means["return"]) + 1)]
    return means


def _figure(title: str, names: Sequence[str], *, height: float, grid: str) -> tuple[Any, list[Any]]:
    """A picture and its named panels side by side, with grid lines on one axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(5.4 * len(names), height), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(title, fontsize=11, x=0.01, ha="left")
    panels = []
    for index, name in enumerate(names):
        axes = picture.add_subplot(1, len(names), index + 1)
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid, alpha=0.25)
        panels.append(axes)
    return picture, panels
