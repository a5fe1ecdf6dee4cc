"""The picture of the demo: the percentile by round, and the return by weight of the values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchrl_lang.evaluation.plots import new_figure, save_figure, tidy
from torchrl_lang.recipes.visual_dialogue_demo.comparison import Comparison

__all__ = ["draw_page"]


def draw_page(path: Path, comparisons: Sequence[Comparison]) -> Path:
    """Draw one column for each reward: above the percentile by round, below the return by beta on validation scenes."""
    curves = any(comparison.curves for comparison in comparisons)
    figure = new_figure(width=5.0 * len(comparisons), height=7.4 if curves else 3.8)
    panels = figure.subplots(1 + curves, len(comparisons), squeeze=False)
    for column, comparison in enumerate(comparisons):
        _draw_percentiles(panels[0][column], comparison)
        if curves:
            _draw_betas(panels[1][column], comparison)
    return save_figure(figure, path, "Visual dialogue: test scenes")


def _draw_percentiles(axes: Any, comparison: Comparison) -> None:
    for row in comparison.rows:
        values = row.percentiles()
        style = "-" if row.decodings else "--"
        axes.plot(range(len(values)), values, style, linewidth=1.5, label=row.name)
    axes.set(xlabel="round", title=f"percentile by round, reward {comparison.penalty!r}")
    tidy(axes)


def _draw_betas(axes: Any, comparison: Comparison) -> None:
    betas = sorted({beta for curve in comparison.curves.values() for beta in curve}, key=float)
    for title, curve in comparison.curves.items():
        shown = [place for place, beta in enumerate(betas) if beta in curve]
        axes.plot(shown, [statistics.fmean(curve[betas[place]]) for place in shown], marker="o", label=title)
    axes.set_xticks(range(len(betas)), betas)
    axes.set(xlabel="beta, the weight of the values", title=f"return under {comparison.penalty!r}, validation scenes")
    tidy(axes)
