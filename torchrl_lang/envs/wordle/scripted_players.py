"""Scripted policies for Wordle: base classes, and policies whose games make a dataset."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

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

__all__ = [
    "OPENERS",
    "MixturePlayer",
    "Player",
    "RandomWordPlayer",
    "RepeatPlayer",
    "WordPlayer",
    "WrongPlayer",
]

_OPENERS = """
adieu aloes arise arose audio crane earls laser opera raise ratio reais reals roast
roate sauce saute shale share shine slate slice soare sooty stare suite tales tears
"""

OPENERS = tuple(_OPENERS.split())
"""The 28 opening words of the ILQL paper's code."""


class Player(TensorDictModuleBase):
    """A scripted policy for Wordle. Abstract: subclasses implement :meth:`choose`.

    It reads ``tokens``, ``attention_mask`` and ``action_mask``, of any batch shape, and writes ``action``, int64
    ``[*B, action_length]``: a word, its end-of-action token, padding. It can be the policy of ``env.rollout`` and of
    collectors. It has its own random generator and can be sent to other processes: a copy continues with the same
    random numbers if a seed was given, otherwise it takes a new seed from the operating system.

    Args:
        action_length: width of the actions in tokens, at least 6: a word and its end.
        seed: seed of the random choices.
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
    """A policy with a list of words. Abstract: subclasses implement :meth:`_choose_word`.

    Args:
        words: the words to play, a list or the path of a file; default the shipped common words.
        rules: the rules of the colours.
        openers: words for the first guess, one drawn uniformly for each game; they need not be on the list (see
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
        """The next word of each game that does not play an opener, int64 letters ``[N, 5]``."""

    def choose(self, turns: Turns) -> Tensor:
        """An opener for first guesses, if there are openers, otherwise the word of :meth:`_choose_word`."""
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
        """Index of a uniform word of each set, int64 ``[N]``; ``fallback`` for empty sets."""
        size = self.sets.size(sets)
        drawn = self.sets.pick(sets, self.below(size.clamp_min(1)))
        return torch.where(size > 0, drawn, fallback)


class RandomWordPlayer(WordPlayer):
    """Plays any word of its list, or with some probability one that fits all colours.

    Args:
        words: see :class:`WordPlayer`.
        prob_smart: probability of a guess drawn uniformly from the words that fit all colours, if there are any;
            otherwise the guess is uniform over all words.
        **kwargs: see :class:`WordPlayer`.

    Examples:
        >>> from torchrl_lang.envs.wordle import RandomWordPlayer, WordleEnv
        >>> words = ["crane", "slate", "point"]
        >>> player = RandomWordPlayer(words, prob_smart=1.0, seed=0)
        >>> games = WordleEnv(words, batch_size=[8], seed=0).rollout(3, player, break_when_any_done=False)
        >>> bool(games["next", "terminated"].any(1).all())  # three words, three guesses
        True
    """

    def __init__(self, words: WordList | None = None, *, prob_smart: float = 0.0, **kwargs: Any) -> None:
        super().__init__(words, **kwargs)
        if not 0 <= prob_smart <= 1:
            raise ValueError(f"prob_smart is a probability, got {prob_smart}.")
        self.prob_smart = prob_smart

    def _choose_word(self, turns: Turns) -> Tensor:
        word = self.any_word(turns)
        if self.prob_smart > 0:
            smart = self.uniform(turns.tries) < self.prob_smart
            word[smart] = self.any_of(turns.rows(smart).filter(self.sets), fallback=word[smart])
        return self.index.letters[word]


class WrongPlayer(WordPlayer):
    """Plays a uniform word among those that the colours exclude, or among all if none is excluded.

    Examples:
        >>> from torchrl_lang.envs.wordle import WordleEnv, WrongPlayer
        >>> words = ["crane", "slate", "point"]
        >>> env, player = WordleEnv(words, batch_size=[8], seed=0), WrongPlayer(words, seed=0)
        >>> env.rollout(2, player, break_when_any_done=False)["action"].shape
        torch.Size([8, 2, 6])
    """

    def _choose_word(self, turns: Turns) -> Tensor:
        impossible = self.sets.all(turns.tries.shape[0]) & ~turns.filter(self.sets)
        return self.index.letters[self.any_of(impossible, fallback=self.any_word(turns))]


class RepeatPlayer(WordPlayer):
    """Begins with a uniform word (or opener), then repeats its earlier guesses, drawn uniformly.

    Args:
        words: see :class:`WordPlayer`.
        first_n: repeats only the first ``first_n`` guesses of the game; all by default.
        **kwargs: see :class:`WordPlayer`.

    Examples:
        >>> from torchrl_lang.envs.wordle import RepeatPlayer, WordleEnv
        >>> env = WordleEnv(["fuzzy"], batch_size=[8], seed=0)
        >>> player = RepeatPlayer(["crane", "slate", "point"], seed=0)
        >>> actions = env.rollout(2, player, break_when_any_done=False)["action"]
        >>> bool((actions[:, 0] == actions[:, 1]).all())
        True
    """

    def __init__(self, words: WordList | None = None, *, first_n: int | None = None, **kwargs: Any) -> None:
        super().__init__(words, **kwargs)
        if first_n is not None and first_n < 1:
            raise ValueError(f"first_n must be at least 1 or None, got {first_n}.")
        self.first_n = first_n

    def _choose_word(self, turns: Turns) -> Tensor:
        letters = self.index.letters[self.any_word(turns)]
        known = turns.answered if self.first_n is None else turns.answered.clamp_max(self.first_n)
        which = self.below(known.clamp_min(1))
        earlier = turns.guess[torch.arange(which.shape[0], device=which.device), which]
        return torch.where((known > 0)[:, None], earlier, letters)


class MixturePlayer(Player):
    """Plays as one of several policies, drawn for each move or for each game.

    With ``per="game"`` it stores the policy of each row of the batch and draws again for rows that begin. So give it
    whole batches whose rows stay in place, as rollouts and collectors do. A batch of another size draws all again.

    Args:
        players: the policies.
        probabilities: the probability of each, summing to one; equal by default.
        per: ``"move"`` or ``"game"``.
        seed: seed of the draw of policies, which have their own seeds.

    Raises:
        ValueError: ``players`` is empty, the probabilities are invalid, or the policies' actions differ in width.

    Examples:
        >>> from torchrl_lang.envs.wordle import MixturePlayer, RandomWordPlayer, WordleEnv, WrongPlayer
        >>> words = ["crane", "slate", "point"]
        >>> players = [RandomWordPlayer(words, prob_smart=1.0, seed=0), WrongPlayer(words, seed=1)]
        >>> mixture = MixturePlayer(players, [0.75, 0.25], per="game", seed=2)
        >>> env = WordleEnv(words, batch_size=[8], seed=0)
        >>> env.rollout(2, mixture, break_when_any_done=False)["action"].shape
        torch.Size([8, 2, 6])
    """

    def __init__(
        self,
        players: Sequence[Player],
        probabilities: Sequence[float] | None = None,
        *,
        per: Literal["move", "game"] = "move",
        seed: int | None = None,
    ) -> None:
        if not players:
            raise ValueError("A MixturePlayer needs at least one player.")
        widths = {player.action_length for player in players}
        if len(widths) != 1:
            raise ValueError(
                f"A MixturePlayer needs players with actions of one width, got action_length={sorted(widths)}."
            )
        super().__init__(action_length=widths.pop(), seed=seed)
        chances = [1 / len(players)] * len(players) if probabilities is None else list(probabilities)
        if len(chances) != len(players) or min(chances) < 0 or abs(sum(chances) - 1) > 1e-6:
            raise ValueError(f"{len(players)} players need as many probabilities that sum to one, got {chances}.")
        if per not in ("move", "game"):
            raise ValueError(f"per={per!r} is unknown: choose 'move' or 'game'.")
        self.players = torch.nn.ModuleList(players)
        self.per = per
        self.register_buffer("_upto", torch.tensor(chances, dtype=torch.float64).cumsum(0)[:-1], persistent=False)
        self._playing: Tensor | None = None

    def choose(self, turns: Turns) -> Tensor:
        """The word of the policy drawn for each game, int64 letters ``[N, 5]``."""
        who = torch.searchsorted(self._upto, self.uniform(turns.tries), right=True)
        if self.per == "game":
            if self._playing is not None and self._playing.shape == who.shape:
                who = torch.where(turns.tries == 0, who, self._playing)
            self._playing = who
        letters = torch.zeros_like(turns.guess[:, 0])
        for number, player in enumerate(self.players):
            assert isinstance(player, Player)
            mine = who == number
            if mine.any():
                letters[mine] = player.choose(turns.rows(mine))
        return letters
