"""Optimality of walks compared with shortest paths."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data.selection import row_returns
from torchrl_lang.envs.random_walks.graph import DirectedGraph
from torchrl_lang.schema import TERMINATED, TOKENS

__all__ = ["optimality", "walk_optimality"]


def optimality(moves: Tensor, shortest: Tensor, max_moves: int) -> Tensor:
    """Optimality of walks as defined in trlx: 1 for a shortest path, 0 for a walk that uses all its moves.

    ``(max_moves - moves) / (max_moves - shortest)``. trlx counts the nodes of a path, one more than its moves; the
    differences are the same.

    Args:
        moves: moves of each walk that reached the goal, ``max_moves`` for a walk that did not; any shape.
        shortest: moves of the shortest path from the same start, below ``max_moves``, of the same shape.
        max_moves: the limit. A walk that reaches the goal with its last move also has optimality 0.

    Returns:
        float32 in ``[0, 1]``, of the same shape.

    Raises:
        ValueError: ``shortest`` is not below ``max_moves`` everywhere.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.random_walks.metrics import optimality
        >>> optimality(torch.tensor([2, 6, 10]), torch.tensor([2, 2, 3]), max_moves=10)
        tensor([1.0000, 0.5000, 0.0000])
    """
    if (shortest >= max_moves).any():
        raise ValueError(f"shortest must be below max_moves={max_moves}, got up to {int(shortest.max())}.")
    return (max_moves - moves).to(torch.float32) / (max_moves - shortest)


def walk_optimality(rows: TensorDictBase, graph: DirectedGraph, max_moves: int) -> Tensor:
    """Optimality of finished rows of :class:`~torchrl_lang.envs.random_walks.RandomWalksEnv`.

    Args:
        rows: rows ``[N]`` with ``terminated`` and the environment's own rewards.
        graph: the graph of the environment.
        max_moves: the environment's ``max_turns``.

    Returns:
        float32 ``[N]``.

    Examples:
        >>> from torchrl_lang.data import rows_from_rollout
        >>> from torchrl_lang.envs.random_walks import RandomWalksEnv, ShortestPathPlayer, walk_optimality
        >>> env = RandomWalksEnv(batch_size=[8], seed=0)
        >>> rollout = env.rollout(10, ShortestPathPlayer(env.graph, env.tokenizer), break_when_any_done=False)
        >>> walk_optimality(rows_from_rollout(rollout, unfinished="drop"), env.graph, env.max_turns).unique()
        tensor([1.])
    """
    moves = -row_returns(rows).round().long()
    moves = torch.where(rows.get(TERMINATED).squeeze(-1), moves, max_moves)
    start = rows.get(TOKENS)[:, 1].long()
    return optimality(moves, graph.distance.to(start.device)[start], max_moves)
