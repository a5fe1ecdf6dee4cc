"""A page of pictures for each part of the demo: games, the return over beta, and over training."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torchrl_lang.envs.random_walks import DirectedGraph
from torchrl_lang.envs.random_walks.task import RandomWalksTask
from torchrl_lang.envs.wordle import WordIndex
from torchrl_lang.envs.wordle.transcript import turns_of_rows
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.evaluation.plots import draw_run, new_figure, read_columns, save_figure, tidy
from torchrl_lang.recipes.demo_options import METHODS
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS

if TYPE_CHECKING:
    from torchrl_lang.recipes.demo import PartResults

_COLOURS = ("0.45", "#c9b458", "#6aaa64")


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
    betas = (0.0, *results.part.options.betas)
    found = [results.summaries[f"ILQL, greedy, beta {beta:g}"] for beta in betas]
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
    for name in ("bc", "best-30", "best-10", "ilql"):
        log = read_columns(results.folder / name / "log.csv")
        draw_run(axes, f"{METHODS[name].title}, greedy", log, "step", "return")
    axes.set(xlabel="step", title="return during training, greedy")
    tidy(axes)


def draw_paths(results: PartResults, axes: list[Any]) -> None:
    """Draw the walk of each player from the same start, the farthest node of the games."""
    graph = cast(RandomWalksTask, results.task).graph
    imitation = results.best("BC")
    players = {"a walk of the data": "BC, sampled at 1", imitation: imitation, results.ilql: results.ilql}
    records = results.records[results.ilql]
    starts = records.rows.get(TOKENS)[:, 1].long()
    game = int(graph.distance[starts].argmax())
    places = _places(graph)
    for (title, name), panel in zip(players.items(), axes, strict=True):
        path = _path(results.records[name], game, len(graph))
        _draw_graph(panel, graph, places)
        for before, after in pairwise(path):
            _arrow(panel, places[before], places[after], color="tab:red", width=2.0)
        reached = "reaches the goal" if path[-1] == graph.goal else "does not reach the goal"
        panel.set_title(f"{title}: {len(path) - 1} moves, {reached}", fontsize="medium")


def _path(records: GameRecords, game: int, nodes: int) -> list[int]:
    """The nodes of a walk: its start, and those that the environment replied."""
    tokens, agent = records.rows.get(TOKENS)[game], records.rows.get(AGENT_MASK)[game]
    real = records.rows.get(ATTENTION_MASK)[game]
    shown: Tensor = tokens[real & ~agent]
    return [node for node in shown.tolist() if node < nodes]


def _places(graph: DirectedGraph) -> dict[int, tuple[float, float]]:
    """Nodes in columns by their distance to the goal, which is on the right."""
    places = {}
    for distance in graph.distance.unique().tolist():
        nodes = (graph.distance == distance).nonzero().flatten().tolist()
        for order, node in enumerate(nodes):
            places[node] = (-float(distance), order - (len(nodes) - 1) / 2 + 0.15 * (distance % 2))
    return places


def _draw_graph(panel: Any, graph: DirectedGraph, places: Mapping[int, tuple[float, float]]) -> None:
    for before, after in graph.edges.nonzero().tolist():
        _arrow(panel, places[before], places[after], color="0.85", width=0.6)
    for node, (x, y) in places.items():
        color = "tab:green" if node == graph.goal else "0.35"
        panel.plot(x, y, "o", color=color, markersize=13)
        panel.annotate(str(node), (x, y), color="white", ha="center", va="center", fontsize=7)
    panel.set_axis_off()


def _arrow(panel: Any, start: tuple[float, float], end: tuple[float, float], *, color: str, width: float) -> None:
    style = {"arrowstyle": "->", "color": color, "lw": width, "shrinkA": 6, "shrinkB": 6}
    panel.annotate("", end, start, arrowprops=style | {"connectionstyle": "arc3,rad=0.12"})


def draw_tiles(results: PartResults, axes: list[Any]) -> None:
    """Draw one game of each player with the same hidden word, the game whose lengths are closest to the means."""
    names = ["BC, sampled at 1", results.best("BC"), results.ilql]
    titles = ["like the data (BC, sampled at 1)", *names[1:]]
    turns = torch.stack([results.records[name].turns.double() for name in names])
    game = int((turns - turns.mean(-1, keepdim=True)).abs().sum(0).argmin())
    for name, title, panel in zip(names, titles, axes, strict=True):
        _draw_game(panel, results.records[name], game)
        panel.set_title(f"{title}: return {float(results.records[name].returns[game]):g}", fontsize="medium")


def _draw_game(panel: Any, records: GameRecords, game: int) -> None:
    rows = records.rows[game : game + 1]
    turns = turns_of_rows(rows)
    for row in range(int(turns.answered)):
        word, colours = WordIndex.text(turns.guess[0, row]).upper(), turns.colours[0, row].tolist()
        for column, (letter, colour) in enumerate(zip(word, colours, strict=True)):
            x, y = [column, column + 0.92, column + 0.92, column], [-row, -row, -row - 0.92, -row - 0.92]
            panel.fill(x, y, color=_COLOURS[colour])
            panel.text(column + 0.46, -row - 0.48, letter, color="white", ha="center", va="center", weight="bold")
    panel.set(xlim=(-0.5, 5.5), ylim=(-6.1, 0.2), aspect="equal")
    panel.set_axis_off()
