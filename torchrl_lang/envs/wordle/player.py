"""What every scripted player of Wordle has in common: it reads the row and writes a guess."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang.envs.wordle.candidate_sets import CandidateSets
from torchrl_lang.envs.wordle.rules import Rules
from torchrl_lang.envs.wordle.tokenizer import wordle_tokenizer
from torchrl_lang.envs.wordle.transcript import Turns, read_turns
from torchrl_lang.envs.wordle.words import (
    WORD_LENGTH,
    WordIndex,
    WordList,
    check_action_length,
    common_words,
    load_words,
)
from torchrl_lang.functional.random_stream import RandomStream
from torchrl_lang.schema import ACTION, ACTION_MASK, ATTENTION_MASK, TOKENS

__all__ = ["OPENERS", "Player", "WordPlayer"]

_OPENERS = """
adieu aloes arise arose audio crane earls laser opera raise ratio reais reals roast
roate sauce saute shale share shine slate slice soare sooty stare suite tales tears
"""

OPENERS = tuple(_OPENERS.split())
"""The 28 opening words of the ILQL paper's code."""


class Player(TensorDictModuleBase):
    """A scripted player of Wordle. Abstract: a player fills in :meth:`choose`.

    It reads ``tokens``, ``attention_mask`` and ``action_mask``, of any batch shape, and writes ``action``, int64
    ``[*B, action_length]``: a word, its end-of-action token, padding. So it plays in ``env.rollout(policy=player)`` and
    in a collector. Its random numbers come from its own generator. It can be sent to other processes: a copy goes on
    with the same numbers if the player was given a seed, and takes a new seed from the operating system if not.

    Args:
        action_length: width of the actions in tokens, at least 6: a word and its end.
        seed: seed of the player's choices.
    """

    def __init__(self, *, action_length: int = WORD_LENGTH + 1, seed: int | None = None) -> None:
        super().__init__()
        check_action_length(action_length)
        self.in_keys = [TOKENS, ATTENTION_MASK, ACTION_MASK]
        self.out_keys = [ACTION]
        self.action_length = action_length
        self._control = wordle_tokenizer().control
        self.stream = RandomStream(seed)

    @abstractmethod
    def choose(self, turns: Turns) -> Tensor:
        """The next word of each game, int64 letters ``[N, 5]``."""

    def uniform(self, like: Tensor) -> Tensor:
        """A uniform number in ``[0, 1)`` for each entry of ``like``, float64."""
        return self.stream.uniform(tuple(like.shape)).to(like.device)

    def below(self, n: Tensor) -> Tensor:
        """A uniform integer in ``[0, n)`` for each entry of ``n`` (int64, positive), of the same shape."""
        return self.stream.below(n)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action`` into the tensordict."""
        tokens, attention, agent = (tensordict.get(key) for key in self.in_keys)
        rows = (entry.reshape(-1, entry.shape[-1]) for entry in (tokens, attention, agent))
        letters = self.choose(read_turns(*rows))
        end = torch.full_like(letters[:, :1], self._control.end_of_action)
        spare = torch.full_like(letters[:, :1], self._control.pad).expand(-1, self.action_length)
        action = torch.cat([letters, end, spare], -1)[:, : self.action_length]
        return tensordict.set(ACTION, action.reshape(*tokens.shape[:-1], self.action_length))


class WordPlayer(Player):
    """A player with a list of words. Abstract: a player fills in :meth:`_choose_word`.

    Args:
        words: the words to play, a list or the path of a file; default the shipped common words.
        rules: the rules that the colours follow.
        openers: words to open with, one drawn uniformly for the first guess of each game, on the list or not (see
            :data:`OPENERS`).
        action_length: see :class:`Player`.
        seed: see :class:`Player`.
    """

    def __init__(
        self,
        words: WordList | None = None,
        *,
        rules: Rules = "official",
        openers: Sequence[str] | None = None,
        action_length: int = WORD_LENGTH + 1,
        seed: int | None = None,
    ) -> None:
        super().__init__(action_length=action_length, seed=seed)
        self.index = WordIndex(common_words() if words is None else load_words(words))
        self.sets = CandidateSets(self.index.letters, rules)
        self.openers = None if openers is None else WordIndex(load_words(openers))

    @abstractmethod
    def _choose_word(self, turns: Turns) -> Tensor:
        """The next word of each game where no opener is played, int64 letters ``[N, 5]``."""

    def choose(self, turns: Turns) -> Tensor:
        """An opener for first guesses, if there are openers, and the player's own choice else."""
        if self.openers is None:
            return self._choose_word(turns)
        letters = self.openers.letters[self.below(torch.full_like(turns.tries, len(self.openers)))]
        later = turns.tries > 0
        if later.any():
            letters[later] = self._choose_word(turns.rows(later))
        return letters

    def any_word(self, turns: Turns) -> Tensor:
        """Index of a uniform word of the list for each game, int64 ``[N]``."""
        return self.below(torch.full_like(turns.tries, len(self.index)))

    def any_of(self, sets: Tensor, fallback: Tensor) -> Tensor:
        """Index of a uniform word of each set, the fallback where it is empty, int64 ``[N]``."""
        size = self.sets.size(sets)
        drawn = self.sets.pick(sets, self.below(size.clamp_min(1)))
        return torch.where(size > 0, drawn, fallback)
