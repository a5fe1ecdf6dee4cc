"""Scripted policies on a directed graph: the random walk that generates the data, and the shortest path."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.random_walks.env import DirectedGraph
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.schema import ACTION, AGENT_MASK, ATTENTION_MASK, TOKENS
from torchrl_lang.text.tokenizers import Tokenizer


class _GraphPlayer(TensorDictModuleBase):
    """Reads the node at the end of a row and writes the next one; subclasses set :attr:`best`, or draw the move."""

    in_keys = [TOKENS, ATTENTION_MASK]
    out_keys = [ACTION]
    best: Tensor
    """int64 ``[V]``: the node to move to from each node."""

    def __init__(self, graph: DirectedGraph, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.graph, self._end = graph, tokenizer.control.end_of_action

    def _next_node(self, node: Tensor) -> Tensor:
        """The node to move to from each ``node``, int64 ``[N]``."""
        return self.best.to(node.device)[node]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the next move of each row, ``action`` int64 ``[*B, 2]``."""
        tokens, real = tensordict.get(TOKENS), tensordict.get(ATTENTION_MASK)
        node = tokens.gather(-1, (real.sum(-1, keepdim=True) - 2).clamp_min(0)).squeeze(-1)
        # Rows that have ended stop at a control token, and their moves are ignored.
        node = torch.where(node < len(self.graph), node, self.graph.goal)
        move = self._next_node(node.reshape(-1)).reshape(node.shape)
        return tensordict.set(ACTION, torch.stack([move, torch.full_like(move, self._end)], -1))


class RandomWalkPlayer(_GraphPlayer):
    """Moves along an edge drawn uniformly.

    Args:
        graph: the graph of the environment.
        tokenizer: the tokenizer of the environment.
        seed: seed of its random generator.

    Examples:
        >>> from torchrl_lang.envs.random_walks import RandomWalkPlayer, RandomWalksEnv
        >>> env = RandomWalksEnv(max_turns=8, batch_size=[64], seed=0)
        >>> walks = env.rollout(8, RandomWalkPlayer(env.graph, env.tokenizer, seed=0), break_when_any_done=False)
        >>> bool(walks["next", "terminated"].any()), bool(walks["next", "truncated"].any())
        (True, True)
    """

    def __init__(self, graph: DirectedGraph, tokenizer: Tokenizer, *, seed: int | None = None) -> None:
        super().__init__(graph, tokenizer)
        self.stream = RandomStream(seed)

    def _next_node(self, node: Tensor) -> Tensor:
        move = self.stream.choice(self.graph.edges.to(node.device)[node])
        return move.clamp_max(len(self.graph) - 1)  # of a goal without edges, where it is ignored

    def log_prob(self, rows: TensorDictBase) -> Tensor:
        """Log-probability of all moves of finished walks along edges, float64 ``[N]``.

        Its negative mean over walks of this policy is its entropy per walk, which no imitation can undercut.

        Args:
            rows: the entries of a row, ``[N, T]``.
        """
        tokens = rows.get(TOKENS).long()
        degree = self.graph.edges.to(tokens.device).sum(-1).clamp_min(1)[_left_nodes(self.graph, tokens)]
        return -torch.where(_moves(self.graph, rows), degree.double().log(), 0.0).sum(-1)


class ShortestPathPlayer(_GraphPlayer):
    """Moves along an edge of a shortest path; ties prefer the smallest node.

    Args:
        graph: the graph of the environment.
        tokenizer: the tokenizer of the environment.
    """

    def __init__(self, graph: DirectedGraph, tokenizer: Tokenizer) -> None:
        super().__init__(graph, tokenizer)
        far = torch.where(graph.distance < 0, len(graph), graph.distance)
        self.best = torch.where(graph.edges, far, len(graph) + 1).argmin(-1)


class FrequentMovePlayer(_GraphPlayer):
    """Moves where walks moved most often from its node: greedy behaviour cloning without any error of learning.

    Args:
        graph: the graph of the environment.
        tokenizer: the tokenizer of the environment.
        rows: the entries of a row, ``[N, T]``: walks to imitate.
    """

    def __init__(self, graph: DirectedGraph, tokenizer: Tokenizer, rows: TensorDictBase) -> None:
        super().__init__(graph, tokenizer)
        tokens, moves = rows.get(TOKENS).long(), _moves(graph, rows)
        nodes = len(graph)
        pairs = _left_nodes(graph, tokens)[moves] * nodes + tokens[moves]
        self.best = torch.bincount(pairs, minlength=nodes * nodes).reshape(nodes, nodes).argmax(-1)


def _moves(graph: DirectedGraph, rows: TensorDictBase) -> Tensor:
    """True on the nodes that the agent named, bool ``[N, T]``."""
    return rows.get(AGENT_MASK) & (rows.get(TOKENS) < len(graph))


def _left_nodes(graph: DirectedGraph, tokens: Tensor) -> Tensor:
    """The last node before each token, which a move there leaves, int64 ``[N, T]``."""
    place = torch.where(tokens < len(graph), torch.arange(tokens.shape[-1], device=tokens.device), 0)
    return tokens.gather(-1, shift_right(place.cummax(-1).values)).clamp_max(len(graph) - 1)
