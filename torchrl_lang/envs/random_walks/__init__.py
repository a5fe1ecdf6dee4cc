"""Shortest paths on a directed graph, learned from random walks (Chen et al. 2021, arXiv 2106.01345)."""

from torchrl_lang.envs.random_walks.env import DirectedGraph, RandomWalksEnv, random_graph, walk_optimality
from torchrl_lang.envs.random_walks.players import RandomWalkPlayer, ShortestPathPlayer

__all__ = [
    "DirectedGraph",
    "RandomWalkPlayer",
    "RandomWalksEnv",
    "ShortestPathPlayer",
    "random_graph",
    "walk_optimality",
]
