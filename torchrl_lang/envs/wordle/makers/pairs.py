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
    """Two guesses in the same state, as :func:`guess_pairs` finds them.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.wordle import GuessPair, WordIndex, wordle_tokenizer
        >>> first_state = torch.tensor([wordle_tokenizer().control.begin_action])
        >>> pair = GuessPair(first_state, *WordIndex(["raise", "fuzzy"]).letters)
        >>> WordIndex.text(pair.expert), WordIndex.text(pair.other)
        ('raise', 'fuzzy')
    """

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
        >>> from torchrl_lang.envs.wordle import BranchedGames, RandomWordPlayer, WordIndex, WordleEnv, guess_pairs
        >>> env = WordleEnv(["crane"], batch_size=[2])
        >>> maker = BranchedGames(env, RandomWordPlayer(["crane"]), RandomWordPlayer(["slate"]), branches=2)
        >>> pairs = guess_pairs(maker(range(1), seed=0))
        >>> [(WordIndex.text(pair.expert), WordIndex.text(pair.other)) for pair in pairs]
        [('crane', 'slate'), ('crane', 'slate')]
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
