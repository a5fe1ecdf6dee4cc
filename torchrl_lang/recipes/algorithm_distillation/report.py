"""The table and the curves of the distillation demo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchrl_lang.algorithm_distillation.report import InContextReport
from torchrl_lang.evaluation import SeedSummary
from torchrl_lang.evaluation.plots import new_figure, save_figure, tidy
from torchrl_lang.evaluation.tables import format_columns

__all__ = ["draw_curves", "format_report"]

_HEAD = ("policy", "episode 1", "last {last}", "of optimal", "regret", "worst task", "never found", "late > early")


def format_report(found: Mapping[str, InContextReport]) -> str:
    """A table with one line per policy, and how AD does on each task."""
    first = next(iter(found.values()))
    lines = [[title.format(last=first.last) for title in _HEAD]]
    lines += [[name, *_cells(report)] for name, report in found.items()]
    episodes, tasks = len(first.mean), len(first.tasks)
    parts = [
        f"{tasks} tasks that no history holds, {episodes} episodes without a change of weights; mean return, standard "
        "errors over training seeds; regret: what the optimum earns more in all episodes.",
        format_columns(lines, "<" + ">" * (len(_HEAD) - 1)),
    ]
    if "AD" in found:
        parts.append(_by_task(found["AD"]))
    return "\n\n".join(parts)


def _cells(report: InContextReport) -> list[str]:
    share, worst = report.share_of_optimal, report.worst_task.share
    return [
        f"{report.mean[0]:.2f}",
        f"{sum(report.mean[-report.last :]) / report.last:.2f}",
        "-" if share is None else f"{_with_error(share, 100)} %",
        _with_error(report.total_regret),
        "-" if worst is None else f"{100 * worst:.0f} %",
        f"{100 * report.never_found:.1f} %",
        f"p = {report.late_beats_early.p_value:.2g}",
    ]


def _with_error(figure: SeedSummary, factor: int = 1) -> str:
    """The mean over training seeds, with its standard error if there are several."""
    error = "" if figure.error is None else f" ± {factor * figure.error:.1f}"
    return f"{factor * figure.mean:.1f}{error}"


def _by_task(report: InContextReport) -> str:
    lines = [["task", "episode 1", f"last {report.last}", "optimal", "never found"]]
    for task in report.tasks:
        figures = (task.first, task.last, task.optimal)
        lines.append([str(task.task), *(f"{value:.2f}" for value in figures), f"{100 * task.never_found:.1f} %"])
    return f"{report.name} by task:\n" + format_columns(lines, ">" * len(lines[0]))


def draw_curves(path: Path, found: Mapping[str, InContextReport]) -> Path:
    """Draw the mean return by episode, with 95 % bands over tasks and seeds."""
    figure = new_figure(width=7.0, height=4.2)
    axes = figure.subplots()
    for name, report in found.items():
        episodes = range(1, len(report.mean) + 1)
        style = "-" if name.startswith(("AD", "ED")) else "--"
        (line,) = axes.plot(episodes, report.mean, style, linewidth=1.5, label=name)
        if style == "-":
            axes.fill_between(episodes, report.low, report.high, alpha=0.15, color=line.get_color(), linewidth=0)
    axes.set(xlabel="episode", ylabel="return")
    tidy(axes)
    return save_figure(figure, path, "Unseen tasks, fixed weights")
