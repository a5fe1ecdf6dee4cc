"""The first part of the demo: shortest paths on a graph, learned from random walks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

from torch import Tensor

from torchrl_lang.data import RowDataset, best_rows
from torchrl_lang.envs.random_walks import DirectedGraph, FrequentMovePlayer
from torchrl_lang.envs.random_walks.task import RandomWalksTask
from torchrl_lang.evaluation import GameRecords
from torchrl_lang.recipes.demo.part import PartResults
from torchrl_lang.recipes.tasks.base import Player, Task
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, TOKENS

__all__ = ["draw_paths", "scripted_walks"]


def scripted_walks(task: Task, data: RowDataset, seed: int) -> Mapping[str, Player]:
    """The most frequent move of the best walks at each node, and a shortest path."""
    graph, tokenizer = cast(RandomWalksTask, task).graph, task.tokenizer()
    copies = {
        f"perfect copy of the best {round(100 * fraction)} %, greedy": Player(
            FrequentMovePlayer(graph, tokenizer, best_rows(data, fraction=fraction))
        )
        for fraction in (0.3, 0.1)
    }
    return copies | {"shortest path": task.player("shortest")}


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
