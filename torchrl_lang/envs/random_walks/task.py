"""Shortest paths from random walks as a task of the recipes (Chen et al. 2021, arXiv 2106.01345)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.random_walks import RandomWalkPlayer, ShortestPathPlayer, walk_optimality
from torchrl_lang.envs.random_walks.env import DirectedGraph, RandomWalksEnv, random_graph, walk_tokenizer
from torchrl_lang.evaluation import GameRecords, KnownValues, Summary, summarize
from torchrl_lang.recipes.tasks.base import Player, Task, named_player
from torchrl_lang.recipes.tasks.random_walks import PRESETS, RandomWalksData, RandomWalksPlay
from torchrl_lang.schema import TOKENS
from torchrl_lang.text import Tokenizer


@dataclass(frozen=True)
class RandomWalksTask(Task):
    """Find the shortest path to the goal of a random directed graph; the metric is optimality.

    With an ``edge_probability`` above 0 each possible edge exists with it, and ``out_degree`` is not used.

    Raises:
        ValueError: there is no such graph, or its farthest node is not less than ``max_turns`` moves away.
    """

    name: ClassVar[str] = "random_walks"
    data_options = RandomWalksData
    play_options = RandomWalksPlay
    presets = PRESETS
    baselines = ("random", "shortest")
    turns_name = "moves"
    metric_meanings: ClassVar[Mapping[str, str]] = {
        "optimality": "1: a shortest path, 0: the goal was not reached; mean over walks"
    }
    action_length = 2  # a node and the end of the action

    nodes: int = 20
    out_degree: int = 2
    graph_seed: int = 4
    max_turns: int = 12
    edge_probability: float = 0.0

    def __post_init__(self) -> None:
        farthest = int(self.graph.distance.max())
        if farthest >= self.max_turns:
            raise ValueError(f"max_turns must be above {farthest}, the farthest node's distance: {self.max_turns}.")

    @cached_property
    def graph(self) -> DirectedGraph:
        """The graph."""
        if self.edge_probability:
            return random_graph(self.nodes, edge_probability=self.edge_probability, seed=self.graph_seed)
        return random_graph(self.nodes, out_degree=self.out_degree, seed=self.graph_seed)

    def tokenizer(self) -> Tokenizer:
        """One symbol for each node."""
        return walk_tokenizer(self.nodes)

    def env(self, batch_size: int, **options: Any) -> RandomWalksEnv:
        """See :meth:`Task.env`."""
        return RandomWalksEnv(self.graph, max_turns=self.max_turns, batch_size=[batch_size], **options)

    def player(self, name: str, seed: int | None = None) -> Player:
        """``"random"``: a uniform edge; ``"shortest"``: an edge of a shortest path."""
        players = {
            "random": lambda: Player(RandomWalkPlayer(self.graph, self.tokenizer(), seed=seed)),
            "shortest": lambda: Player(ShortestPathPlayer(self.graph, self.tokenizer()), is_random=False),
        }
        return named_player(name, players)()

    def known_values(self, rows: TensorDictBase) -> list[KnownValues]:
        """The moves along the exits of each node in which the walks of ``rows`` begin."""
        states = []
        for begin in rows.get(TOKENS)[:, :3].long().unique(dim=0):  # a node between two control tokens
            exits = self.graph.edges[int(begin[1])].nonzero()
            states.append(KnownValues(begin, exits, -1.0 - self.graph.distance[exits[:, 0]]))
        return states

    def won(self, records: GameRecords) -> Tensor:
        """Walks that reached the goal, bool ``[N]``."""
        return records.terminated

    def optimality(self, records: GameRecords) -> Tensor:
        """Optimality of each walk, float32 ``[N]`` in ``[0, 1]``."""
        rows = records.rows.copy().set("terminated", records.terminated[:, None])
        return walk_optimality(rows, self.graph, self.max_turns)

    def summary(self, records: GameRecords, name: str) -> Summary:
        """Metrics of walks, with their optimality."""
        return summarize(records, name=name, won=self.won, metrics={"optimality": self.optimality})
