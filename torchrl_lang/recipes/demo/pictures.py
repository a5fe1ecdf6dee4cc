"""A page of pictures for each part of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrl_lang.evaluation.plots import draw_run, new_figure, read_columns, save_figure, tidy
from torchrl_lang.recipes.demo.part import IMITATIONS, PartResults

__all__ = ["draw_page"]


def draw_page(path: Path, results: PartResults) -> Path:
    """Draw a part's page: three games above; below, the return over beta and over training.

    Args:
        path: the PNG file.
        results: of the part.
    """
    figure = new_figure(width=14, height=8.4)
    above, below = figure.subfigures(2, 1, height_ratios=[1.05, 1])
    results.part.illustrate(results, list(above.subplots(1, 3)))
    left, right = below.subplots(1, 2)
    _draw_betas(left, results)
    _draw_training(right, results)
    return save_figure(figure, path, results.part.title)


def _draw_betas(axes: Any, results: PartResults) -> None:
    """ILQL's return over the weight of its values, beside the best imitations and the optimum."""
    betas = (0.0, *results.part.betas)
    found = [results.summaries[f"ILQL beta {beta:g}, greedy"] for beta in betas]
    errors = [summary.return_error or 0.0 for summary in found]
    places = range(len(betas))
    axes.errorbar(places, [s.mean_return for s in found], errors, marker="o", capsize=3, color="tab:red", label="ILQL")
    lines = {"best trained imitation: " + results.best("BC"): results.best("BC"), results.optimum: results.optimum}
    lines = {"data": "data", "best perfect imitation": results.best("perfect copy"), **lines}
    styles = [":", "-.", "--", "-"]
    for (label, name), style in zip(lines.items(), styles, strict=True):
        axes.axhline(results.summaries[name].mean_return, color="0.4", linewidth=1, linestyle=style, label=label)
    axes.set_xticks(places, [f"{beta:g}" for beta in betas])
    axes.set(xlabel="beta, the weight of the values", title="return by beta, greedy")
    tidy(axes)


def _draw_training(axes: Any, results: PartResults) -> None:
    """The return of all runs during training, all greedy."""
    labels = {name: label for name, (label, _) in IMITATIONS.items()} | {"ilql": "ILQL"}
    for name, label in labels.items():
        draw_run(axes, f"{label}, greedy", read_columns(results.folder / name / "log.csv"), "step", "return")
    axes.set(xlabel="step", title="return during training, greedy")
    tidy(axes)
