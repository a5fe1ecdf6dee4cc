"""A policy for Wordle that plays opening words as long as they fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_lang.envs.wordle.candidate_sets import CandidateSets
from torchrl_lang.envs.wordle.scripted_players import OPENERS, WordPlayer
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import WordIndex, WordList, load_words

__all__ = ["StartWordPlayer"]


class StartWordPlayer(WordPlayer):
    """Plays a uniform start word that fits all colours; if none fits, a uniform word of its list that does.

    The ILQL paper's start policy. The option ``openers`` of the other players plays such a word in the first turn only.

    Args:
        words: see :class:`WordPlayer`. If none of these fits either, any of them is played.
        starts: the start words, which need not be on the list; default :data:`OPENERS`.
        **kwargs: ``rules``, ``action_length`` and ``seed``, see :class:`WordPlayer`.

    Examples:
        >>> from torchrl_lang.envs.wordle import StartWordPlayer, WordIndex, WordleEnv
        >>> env = WordleEnv(["tummy"], batch_size=[2], seed=0)
        >>> player = StartWordPlayer(["tummy", "point"], starts=["slate", "roast"], seed=0)
        >>> guesses = env.rollout(2, player)["action"][0, :, :5]
        >>> [WordIndex.text(guess) for guess in guesses]
        ['roast', 'tummy']
    """

    def __init__(self, words: WordList | None = None, *, starts: Sequence[str] = OPENERS, **kwargs: Any) -> None:
        if kwargs.get("openers") is not None:
            raise ValueError("A StartWordPlayer has no openers: give its words as starts.")
        super().__init__(words, **kwargs)
        self.starts = WordIndex(load_words(starts))
        self.start_sets = CandidateSets(self.starts.letters, self.sets.rules)

    def _choose_word(self, turns: Turns) -> Tensor:
        starts = turns.filter(self.start_sets)
        size = self.start_sets.size(starts)
        fitting = self.start_sets.pick(starts, self.stream.below(size.clamp_min(1))).clamp_max(len(self.starts) - 1)
        other = self.any_of(turns.filter(self.sets), fallback=self.any_word(turns))
        return torch.where((size > 0)[:, None], self.starts.letters[fitting], self.index.letters[other])

    def probability(self, turns: Turns, letters: Tensor) -> Tensor:
        """See :meth:`Player.probability`."""
        starts = turns.filter(self.start_sets)
        size, start, word = self.start_sets.size(starts), self.starts.find(letters), self.index.find(letters)
        fits = self.start_sets.members(starts).gather(-1, start.clamp_min(0)[:, None]).squeeze(-1) & (start >= 0)
        other = torch.where(word < 0, 0.0, self.chance_of(turns.filter(self.sets), word.clamp_min(0)))
        return torch.where(size > 0, fits / size.clamp_min(1).double(), other)
