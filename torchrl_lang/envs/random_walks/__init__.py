"""Shortest paths on a directed graph, learned from random walks (Chen et al. 2021, arXiv 2106.01345)."""

from torchrl_lang.envs.random_walks.env import RandomWalksEnv, walk_tokenizer
from torchrl_lang.envs.random_walks.graph import DirectedGraph, random_graph
from torchrl_lang.envs.random_walks.metrics import optimality, walk_optimality
from torchrl_lang.envs.random_walks.players import FrequentMovePlayer, RandomWalkPlayer, ShortestPathPlayer

__all__ = [
    "DirectedGraph",
    "FrequentMovePlayer",
    "RandomWalkPlayer",
    "RandomWalksEnv",
    "ShortestPathPlayer",
    "optimality",
    "random_graph",
    "walk_optimality",
    "walk_tokenizer",
]
