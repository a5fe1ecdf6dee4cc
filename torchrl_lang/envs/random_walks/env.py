"""Walks on a directed graph as a tensor-only language task; the graph, and how close walks come to shortest paths."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Unpack

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Unit, check_options, checked
from torchrl_lang.data.selection import row_returns
from torchrl_lang.envs.language_env import EpisodeOptions, LanguageEnv, Reply, TaskState
from torchrl_lang.envs.reset_inputs import in_range
from torchrl_lang.envs.row_state import Rows, Utterance
from torchrl_lang.functional.random import random_index
from torchrl_lang.schema import TERMINATED, TOKENS
from torchrl_lang.text.tokenizers import CharTokenizer


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
        square = edges.dtype == torch.bool and edges.shape == (len(edges), len(edges))
        if not square or len(edges) < 2 or edges.diagonal().any():
            raise ValueError(f"edges must be bool [V, V], V at least 2, with a False diagonal, got {edges}.")
        check_options(goal=(goal, range(len(edges))))
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


@checked
def random_graph(
    nodes: Annotated[int, 2] = 21,
    *,
    edge_probability: Unit = 0.1,
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
    check_options(out_degree=(out_degree, (None, *range(1, nodes))))
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


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def walk_tokenizer(nodes: int) -> CharTokenizer:
    """A tokenizer with one symbol per node, whose id is the node's number: letters up to 26 nodes, then ``n00``, ...

    Examples:
        >>> from torchrl_lang.envs.random_walks.env import walk_tokenizer
        >>> walk_tokenizer(3).encode("cab"), walk_tokenizer(100).decode([7, 42])
        ([2, 0, 1], 'n07n42')
    """
    width = len(str(nodes - 1))
    symbols = list(_LETTERS[:nodes]) if nodes <= len(_LETTERS) else [f"n{node:0{width}d}" for node in range(nodes)]
    return CharTokenizer.from_alphabet(symbols)


class RandomWalksEnv(LanguageEnv):
    """Find the shortest path to the goal of a directed graph (arXiv 2106.01345, section 3.1; trlx's ILQL example).

    The environment writes the agent's node; the agent writes a node to move to. If that edge exists the agent moves,
    otherwise (also if the action is not a single node) it stays. Every move has reward -1. A walk terminates at the
    goal and is truncated after ``max_turns`` moves, so its return is minus the number of its moves.

    A row is ``<s>d</s>b</a>b</s>a</a>a</s></eod>``. ``reset`` accepts the first node, ``start`` int64 ``[*B]``, as an
    entry of the tensordict or by keyword.

    Args:
        graph: default ``random_graph()``, 21 nodes with edge probability 0.1.
        max_turns: number of moves after which a walk is truncated.
        **options: ``batch_size``, ``group_size``, ``seed`` and ``device``, as in
            :class:`~torchrl_lang.envs.LanguageEnv`.

    Raises:
        ValueError: no node but the goal has a path to the goal within ``max_turns`` moves. Walks start at such nodes.

    Examples:
        >>> from torchrl_lang.data import rows_from_rollout
        >>> from torchrl_lang.envs.random_walks import RandomWalksEnv, ShortestPathPlayer, random_graph
        >>> graph = random_graph(20, out_degree=3, seed=0)
        >>> env = RandomWalksEnv(graph, batch_size=[4], seed=0)
        >>> rollout = env.rollout(10, ShortestPathPlayer(graph, env.tokenizer), break_when_any_done=False)
        >>> walks = rows_from_rollout(rollout, unfinished="drop")
        >>> bool((walks["token_reward"].sum(-1) == -graph.distance[walks["tokens"][:, 1]]).all())
        True
    """

    _reset_entries = ("start",)

    def __init__(
        self, graph: DirectedGraph | None = None, *, max_turns: int = 10, **options: Unpack[EpisodeOptions]
    ) -> None:
        self.graph = random_graph() if graph is None else graph
        near = (self.graph.distance > 0) & (self.graph.distance <= max_turns)
        if not near.any():
            raise ValueError(f"No node has a path to the goal within max_turns={max_turns} moves: allow more.")
        # An opening of 3 tokens, a move of 2, a reply of 2, the end-of-dialogue token, and one more token of an action.
        limits = {"row_length": 5 + 5 * max_turns, "action_length": 2, "max_turns": max_turns}
        super().__init__(walk_tokenizer(len(self.graph)), **limits, **options)
        self._starts: Tensor
        self._edges: Tensor
        self.register_buffer("_starts", near.nonzero().flatten().to(self.device), persistent=False)
        self.register_buffer("_edges", self.graph.edges.to(self.device), persistent=False)

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        named = self._named(options, "start")
        drawn = self._starts[random_index(self._key, episode, len(self._starts))]
        node = drawn if named is None else self._before_goal(named, fresh)
        return node[:, None], torch.ones_like(node), {"node": node}

    def _reply(self, utterance: Utterance, task: TaskState, live: Tensor) -> tuple[Reply, TaskState]:
        node, named = task["node"], utterance.tokens[:, 0]
        is_node = (utterance.length == 1) & (named < len(self.graph))
        named = torch.where(is_node, named, node)
        node = torch.where(self._edges[node, named], named, node)
        reward = torch.full_like(node, -1.0, dtype=torch.float32)
        return Reply(node[:, None], torch.ones_like(node), reward, node == self.graph.goal), {"node": node}

    def _restore(self, rows: Rows, task: TaskState, fresh: Tensor, options: TensorDictBase | None) -> TaskState:
        # The node is the last token of the environment's reply before the end of the reply.
        node = rows.tokens.gather(-1, (rows.length - 2).clamp_min(0)[:, None]).squeeze(-1)
        return {"node": self._before_goal(node, fresh)}

    def possible_starts(self, most: int) -> Tensor:
        """See :meth:`LanguageEnv.possible_starts`: nodes with a path to the goal."""
        return self._starts[:most]

    def _before_goal(self, node: Tensor, fresh: Tensor) -> Tensor:
        node = torch.where(node == self.graph.goal, -1, node)  # where no walk can begin
        return in_range(f"start, other than the goal {self.graph.goal},", node, fresh, len(self.graph))


def walk_optimality(rows: TensorDictBase, graph: DirectedGraph, max_moves: int) -> Tensor:
    """Optimality of walks as defined in trlx: 1 for a shortest path, 0 for a walk that uses all its moves.

    ``(max_moves - moves) / (max_moves - shortest)``. trlx counts the nodes of a path, one more than its moves; the
    differences are the same.

    Args:
        rows: finished rows ``[N]`` of :class:`~torchrl_lang.envs.random_walks.RandomWalksEnv`, with ``terminated`` and
            the environment's own rewards.
        graph: the graph of the environment.
        max_moves: the environment's ``max_turns``.

    Returns:
        float32 ``[N]`` in ``[0, 1]``.

    Raises:
        ValueError: a walk began ``max_moves`` away from the goal, where all walks have the same optimality: allow more.

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
    shortest = graph.distance.to(moves.device)[rows.get(TOKENS)[:, 1].long()]
    if (shortest >= max_moves).any():
        raise ValueError(f"A shortest path has {int(shortest.max())} moves, expected fewer than max_moves={max_moves}.")
    return (max_moves - moves).to(torch.float32) / (max_moves - shortest)
