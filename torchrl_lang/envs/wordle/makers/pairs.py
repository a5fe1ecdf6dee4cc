"""The guesses of an expert and of another player in the same states of branched and adversarial games."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.envs.wordle.makers.continuing import BRANCH_TURN, GAME, KIND, number_of_guesses
from torchrl_lang.envs.wordle.words import TURN_LENGTH, WORD_LENGTH
from torchrl_lang.schema import TOKENS, entry

__all__ = ["GuessPair", "guess_pairs"]


class GuessPair(NamedTuple):
    """Two guesses in the same state."""

    tokens: Tensor
    """int64 ``[T]``, the row before the guess, without padding."""
    expert: Tensor
    """int64 ``[5]``, the expert's guess."""
    other: Tensor
    """int64 ``[5]``, the other player's guess."""


def guess_pairs(rows: TensorDictBase, kind: int = 1) -> list[GuessPair]:
    """For each row of a kind, the expert's guess in the state where the row branches off, and the row's own.

    They are what a ranking by learned values is tested on: ``Comparison(*pair)`` is an input of
    :func:`~torchrl_lang.evaluation.preference_rates`.

    Args:
        rows: rows of :class:`~torchrl_lang.envs.wordle.BranchedGames` or
            :class:`~torchrl_lang.envs.wordle.AdversarialGames`, e.g. ``dataset[:]``; all guesses are valid.
        kind: the number of the kind: 1 for branches, or for the adversary's guesses after the expert's first two; 2 for
            first guesses of the suboptimal player.

    Returns:
        The pairs in the order of the rows. Rows whose guess is the expert's, or whose expert's row is missing, have
        none.

    Examples:
        >>> from torchrl_lang.envs.wordle import BranchedGames, WordleEnv, demo_words, guess_pairs
        >>> rows = BranchedGames(WordleEnv(demo_words(30), batch_size=[16]))(range(4), seed=0)
        >>> pairs = guess_pairs(rows)
        >>> len(pairs) <= int((rows["kind"] == 1).sum()), pairs[0].expert.shape
        (True, torch.Size([5]))
    """
    tokens, kinds, turn = entry(rows, TOKENS).long(), entry(rows, KIND), entry(rows, BRANCH_TURN)
    place = {game: row for row, game in enumerate(entry(rows, GAME).tolist()) if kinds[row] == 0}
    guesses = number_of_guesses(rows)
    pairs = []
    for row in (kinds == kind).nonzero().flatten().tolist():
        expert, length = place.get(int(rows.get(GAME)[row])), 1 + int(turn[row]) * TURN_LENGTH
        if expert is None or guesses[expert] <= turn[row]:
            continue
        best, other = (tokens[each, length : length + WORD_LENGTH] for each in (expert, row))
        if not torch.equal(best, other):
            pairs.append(GuessPair(tokens[row, :length], best, other))
    return pairs
