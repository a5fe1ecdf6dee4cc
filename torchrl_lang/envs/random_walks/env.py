"""Walks on a directed graph as a tensor-only language task, in which each move is a turn of one token."""

from __future__ import annotations

from typing import Unpack

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.language_env import LanguageEnv, Reply, TaskState
from torchrl_lang.envs.random_walks.graph import DirectedGraph, random_graph
from torchrl_lang.envs.row_state import Rows, Utterance
from torchrl_lang.envs.seeded_env import EnvOptions
from torchrl_lang.functional import random_index
from torchrl_lang.text.tokenizers import CharTokenizer

__all__ = ["RandomWalksEnv", "walk_tokenizer"]

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
        **options: ``batch_size``, ``seed`` and ``device``, as in :class:`~torchrl_lang.envs.LanguageEnv`.

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
        self,
        graph: DirectedGraph | None = None,
        *,
        max_turns: int = 10,
        **options: Unpack[EnvOptions],
    ) -> None:
        self.graph = random_graph() if graph is None else graph
        near = (self.graph.distance > 0) & (self.graph.distance <= max_turns)
        if not near.any():
            raise ValueError(f"No node has a path to the goal within max_turns={max_turns} moves: allow more.")
        # An opening of 3 tokens, a move of 2, a reply of 2, the end-of-dialogue token, and one more token of an action.
        super().__init__(
            walk_tokenizer(len(self.graph)),
            row_length=5 + 5 * max_turns,
            action_length=2,
            max_turns=max_turns,
            **options,
        )
        self._starts: Tensor
        self._edges: Tensor
        self.register_buffer("_starts", near.nonzero().flatten().to(self.device), persistent=False)
        self.register_buffer("_edges", self.graph.edges.to(self.device), persistent=False)

    def _open(self, episode: Tensor, fresh: Tensor, options: TensorDictBase | None) -> tuple[Tensor, Tensor, TaskState]:
        node = self._starts[random_index(self._key, episode, len(self._starts))]
        named = self._named(options, "start")
        if named is not None:
            node = self._checked_start(named, fresh)
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
        return {"node": self._checked_start(node, fresh)}

    def _checked_start(self, node: Tensor, fresh: Tensor) -> Tensor:
        is_start = (node >= 0) & (node < len(self.graph)) & (node != self.graph.goal)
        bad = fresh & ~is_start
        if bad.any():
            raise ValueError(f"start must be a node other than the goal {self.graph.goal}, got {node[bad].tolist()}.")
        return torch.where(fresh, node, self._starts[0])
