"""Directed graphs with a goal: random graphs, and the exact distance from every node to the goal."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from torchrl_lang._checks import count, have_shapes, within

__all__ = ["DirectedGraph", "random_graph"]


class DirectedGraph:
    """A directed graph with a goal node.

    Args:
        edges: bool ``[V, V]``; ``edges[i, j]`` is True for an edge from node ``i`` to node ``j``. No node has an
            edge to itself. Edges out of the goal are never used, because a walk ends there.
        goal: number of the goal node.

    Raises:
        ValueError: ``edges`` is not a square bool matrix of at least two nodes, a node has an edge to itself, or
            ``goal`` is not a node.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.random_walks import DirectedGraph
        >>> ring = DirectedGraph(torch.tensor([[0, 1, 0], [0, 0, 1], [1, 0, 0]]).bool())
        >>> ring.distance  # moves from nodes 0, 1 and 2 to the goal, node 0
        tensor([0, 2, 1])
    """

    def __init__(self, edges: Tensor, goal: int = 0) -> None:
        have_shapes(("edges", edges, (len(edges), len(edges))))
        if edges.dtype != torch.bool or len(edges) < 2 or edges.diagonal().any():
            raise ValueError(f"edges must be bool [V, V], V at least 2, with a False diagonal, got {edges}.")
        within("goal", goal, 0, len(edges) - 1)
        self.edges, self.goal = edges.clone(), goal

    def __len__(self) -> int:
        return self.edges.shape[0]

    @cached_property
    def distance(self) -> Tensor:
        """Fewest moves from each node to the goal, int64 ``[V]``; -1 if there is no path."""
        distance = torch.full((len(self),), -1)
        reached = torch.arange(len(self)) == self.goal
        moves = 0
        while reached.any():
            distance[reached] = moves
            # One step of a breadth-first search, backwards from the goal.
            reached = (self.edges & reached).any(-1) & (distance < 0)
            moves += 1
        return distance


def random_graph(
    nodes: int = 21,
    *,
    edge_probability: float = 0.1,
    out_degree: int | None = None,
    goal: int = 0,
    seed: int = 0,
) -> DirectedGraph:
    """Draw a random directed graph in which every node has an outgoing edge and a path to the goal.

    Graphs without these properties are drawn again.

    Args:
        nodes: number of nodes ``V``.
        edge_probability: probability of each possible edge; ignored if ``out_degree`` is given.
        out_degree: give every node exactly this many edges to other nodes, drawn uniformly.
        goal: number of the goal node.
        seed: seed of the graph.

    Raises:
        ValueError: an argument is out of range, or no such graph was found in 10,000 draws.

    Examples:
        >>> from torchrl_lang.envs.random_walks import random_graph
        >>> graph = random_graph(20, out_degree=3, seed=0)
        >>> graph.edges.sum(-1).unique().tolist(), int(graph.distance.min())
        ([3], 0)
    """
    count("nodes", nodes, low=2)
    within("out_degree", 1 if out_degree is None else out_degree, 1, nodes - 1)
    within("edge_probability", edge_probability, 0, 1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10_000):
        chance = torch.rand(nodes, nodes, generator=generator).fill_diagonal_(2.0)
        if out_degree is None:
            edges = chance < edge_probability
        else:
            nearest = chance.argsort(-1)[:, :out_degree]
            edges = torch.zeros(nodes, nodes, dtype=torch.bool).scatter_(1, nearest, True)
        graph = DirectedGraph(edges, goal)
        if edges.any(-1).all() and (graph.distance >= 0).all():
            return graph
    found = f"edge_probability={edge_probability} and out_degree={out_degree}"
    raise ValueError(f"None of 10,000 graphs of {nodes} nodes has paths to the goal with {found}: give more.")
