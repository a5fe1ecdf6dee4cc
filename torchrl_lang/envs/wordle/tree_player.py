"""A policy for Wordle that follows a decision tree."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from torchrl_lang.envs.wordle.decision_tree import DecisionTree
from torchrl_lang.envs.wordle.optimal import OptimalPlayer
from torchrl_lang.envs.wordle.rules import SOLVED, feedback_code
from torchrl_lang.envs.wordle.scripted_players import Player
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import WordIndex

__all__ = ["TreePlayer"]


class TreePlayer(Player):
    """Follows a :class:`DecisionTree`, such as the one of :func:`solve`.

    A game whose guesses so far are not the tree's, because it was continued from other rows or another policy plays in
    turn, has no node. Another player chooses the guess there.

    Args:
        tree: the tree, or the path of its file.
        otherwise: plays the games that have left the tree; by default :class:`OptimalPlayer` with the tree's words.
        **kwargs: see :class:`Player`.

    Raises:
        ValueError: the actions of ``otherwise`` have another width.

    Examples:
        >>> from torchrl_lang.envs.wordle import TreePlayer, WordleEnv, demo_words, expected_return, solve
        >>> words = demo_words(50)
        >>> player = TreePlayer(solve(words))
        >>> games = WordleEnv(words, batch_size=[8], seed=0).rollout(4, player, break_when_any_done=False)
        >>> bool(games["next", "terminated"].any(1).all())
        True
        >>> expected_return(player, words).mean
        -1.34
    """

    next_node: Tensor
    letters: Tensor

    def __init__(
        self, tree: DecisionTree | str | os.PathLike[str], *, otherwise: Player | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.tree = tree if isinstance(tree, DecisionTree) else DecisionTree.load(tree)
        if otherwise is None:
            otherwise = OptimalPlayer(self.tree.words, rules=self.tree.rules, **kwargs)
        if otherwise.action_length != self.action_length:
            raise ValueError(
                f"Both players need actions of one width, got action_length={self.action_length} and "
                f"otherwise.action_length={otherwise.action_length}."
            )
        self.otherwise = otherwise
        next_node = self.tree.next_node.clone()
        next_node[:, SOLVED] = 0  # a solved game ends, so what is played there does not matter
        self.register_buffer("next_node", next_node, persistent=False)
        self.register_buffer("letters", WordIndex(self.tree.guesses).letters, persistent=False)

    def choose(self, turns: Turns) -> Tensor:
        """The guess of each game's node, int64 letters ``[N, 5]``."""
        node = self.node(turns)
        letters = self.letters[node.clamp_min(0)]
        left = node < 0
        if left.any():
            letters[left] = self.otherwise.choose(turns.rows(left))
        return letters

    def node(self, turns: Turns) -> Tensor:
        """The node of each game, -1 for games that have left the tree; int64 ``[N]``. Invalid guesses do not count."""
        node = torch.zeros_like(turns.tries)
        code = feedback_code(turns.colours)
        for turn in range(turns.guess.shape[1]):
            heard = turn < turns.answered
            if not heard.any():
                break
            at = node.clamp_min(0)
            same = (turns.guess[:, turn] == self.letters[at]).all(-1) & (node >= 0)
            node = torch.where(heard, torch.where(same, self.next_node[at, code[:, turn]], -1), node)
        return node
