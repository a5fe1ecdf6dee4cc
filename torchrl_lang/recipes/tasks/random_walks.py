"""Options and presets of random walks on a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl_lang.recipes.options import DataOptions, PlayOptions, option, with_defaults
from torchrl_lang.recipes.tasks import GamesOptions

_MODEL = {"layers": 2, "width": 64, "heads": 4, "eval_every": 100}
PRESETS: dict[str, dict[str, Any]] = {
    "bc": {**_MODEL, "steps": 200},
    "ilql": {
        **_MODEL,
        "steps": 600,
        "beta": 2.0,
        "expectile": 0.9,
        "value_weight": 1.0,
        "qvalue_weight": 1.0,
        # All rewards are negative, so moves without data look good unless the CQL term is strong.
        "cql_weight": 0.2,
        "tau": 0.05,
        "reward_scale": 0.2,  # of psi-learning: a move is worth more than the choice among exits
    },
    "evaluate": {"beta": (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)},
}


@dataclass(frozen=True, kw_only=True)
class RandomWalksGames(GamesOptions, of_task="random_walks"):
    """Options that define the graph."""

    nodes: int = option(20, "nodes of the graph", ge=2, le=1000)
    out_degree: int = option(2, "edges out of each node", ge=1)
    graph_seed: int = option(4, "seed of the graph", ge=0)
    max_turns: int = option(12, "moves before a walk is truncated", ge=1)
    edge_probability: float = option(
        0.0, "probability of each possible edge; 0: --out-degree edges out of each node", ge=0, le=1
    )


@with_defaults(games=2000)
class RandomWalksData(RandomWalksGames, DataOptions):
    """Generate a dataset of uniform random walks on a directed graph."""


@dataclass(frozen=True, kw_only=True)
class RandomWalksPlay(RandomWalksGames, PlayOptions):
    """Look for the shortest path to the goal yourself, or watch a policy."""
