"""Curves of a benchmark as pictures. Needs matplotlib, the extra ``plots``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Median

COLOURS = ("0.25", "#1b6ca8", "#0b9e8f", "#d1495b", "#7a4fb5")  # of the lines in their order
GAP = 0.075  # between two names, as a part of the panel's height
ROOM = 0.17  # that a tick's number takes, as a part of the panel's width


def described(name: str, title: str, x: str, panels: dict[str, dict[str, dict[int, float]]]) -> dict[str, Any]:
    """What :func:`draw` draws, as plain data that stays in a record: panel -> line -> place on the x axis -> value.

    Medians bring their quartiles along.
    """
    return {
        "name": name,
        "title": title,
        "x": x,
        "panels": [
            {"title": panel, "curves": {line: _points(values) for line, values in lines.items()}}
            for panel, lines in panels.items()
        ],
    }


def _points(values: dict[int, float]) -> dict[str, list[float]]:
    points: dict[str, list[float]] = {"x": list(values), "y": [float(value) for value in values.values()]}
    spreads = [(value.low, value.high) for value in values.values() if isinstance(value, Median)]
    if len(spreads) == len(values):
        points |= {"low": [low for low, _ in spreads], "high": [high for _, high in spreads]}
    return points


def draw(figure: dict[str, Any], folder: Path) -> Path:
    """Write what :func:`described` made as a PNG file: both axes logarithmic, each line named where it ends.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'torchrl-lang[plots]'.") from error
    # A bare Figure, not pyplot: no window, no global state, and always the Agg renderer.
    picture = Figure(figsize=(5.4 * len(figure["panels"]), 3.9), dpi=120, layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(figure["title"], fontsize=11, x=0.01, ha="left")
    names = list(dict.fromkeys(name for panel in figure["panels"] for name in panel["curves"]))
    colours = dict(zip(names, COLOURS, strict=False))
    for index, panel in enumerate(figure["panels"]):
        axes = picture.add_subplot(1, len(figure["panels"]), index + 1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for name, points in panel["curves"].items():
            _line(axes, points, colours[name])
        axes.set(xlabel=figure["x"])
        axes.set_title(panel["title"], loc="left", fontsize=10)
        _tidy(axes, max(panel["curves"].values(), key=lambda points: len(points["x"]))["x"])
        _name_lines(axes, panel["curves"], colours)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{figure['name']}.png"
    save(picture, path)
    return path


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places at least ``gap`` apart, in the same order, near the wanted ones; crowded ones share what they give way.

    >>> apart([0.9, 0.1, 0.5], 0.1)
    [0.9, 0.1, 0.5]
    >>> [round(place, 3) for place in apart([0.5, 0.5, 0.9], 0.1)]
    [0.45, 0.55, 0.9]
    """
    clusters: list[list[int]] = []

    def centre(cluster: list[int]) -> float:
        return sum(wanted[i] for i in cluster) / len(cluster)

    for i in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        clusters.append([i])
        while len(clusters) > 1:
            lower, upper = clusters[-2:]
            if centre(upper) - centre(lower) >= gap * (len(upper) + len(lower)) / 2 - 1e-9:
                break
            clusters[-2:] = [lower + upper]
    places = [0.0] * len(wanted)
    for cluster in clusters:
        for rank, i in enumerate(cluster):
            places[i] = centre(cluster) + (rank - (len(cluster) - 1) / 2) * gap if len(cluster) > 1 else wanted[i]
    return places


def _line(axes: Any, points: dict[str, list[float]], colour: str) -> None:
    axes.plot(points["x"], points["y"], color=colour, linewidth=1.6, marker="o", markersize=3.5)
    if "low" in points:
        axes.fill_between(points["x"], points["low"], points["high"], color=colour, alpha=0.2, linewidth=0)


def save(picture: Any, path: Path) -> None:
    """As a PNG file of 64 colours, a third of the size that it would have else."""
    from PIL import Image  # matplotlib needs it, too

    picture.canvas.draw()
    size = picture.canvas.get_width_height()
    image = Image.frombytes("RGBA", size, bytes(picture.canvas.buffer_rgba())).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _tidy(axes: Any, x: Sequence[float]) -> None:
    """Few lines, and a tick at each of ``x`` that the next one leaves room for."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.tick_params(labelsize=9)
    axes.xaxis.set_minor_locator(NullLocator())
    room = (max(x) / min(x)) ** ROOM
    ticks = [value for value, after in zip(x, [*x[1:], math.inf], strict=True) if after / value >= room]
    axes.set_xticks(ticks, [f"{value:,.0f}" for value in ticks])
    low, high = axes.get_ylim()
    narrow = high / low < 100
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _name_lines(axes: Any, curves: dict[str, dict[str, list[float]]], colours: dict[str, str]) -> None:
    """Each line's name right of its last point, in its colour; where lines end close together names make room."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    heights = [(math.log(points["y"][-1]) - low) / (high - low) for points in curves.values()]
    for (name, points), height, place in zip(curves.items(), heights, apart(heights, GAP), strict=True):
        axes.annotate(
            name,
            (points["x"][-1], points["y"][-1]),
            xytext=(1.03, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=colours[name],
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.6, "alpha": 0.6}
            if abs(place - height) > 0.01 or points["x"][-1] < max(max(other["x"]) for other in curves.values())
            else None,
        )
