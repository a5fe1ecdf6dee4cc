"""Scripted policies for Wordle: base classes, and policies of random words."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from torchrl_lang._checks import Count, Unit, checked
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.envs.wordle.rules import CandidateSets, Rules
from torchrl_lang.envs.wordle.transcript import Turns, read_turns, turns_of_rows
from torchrl_lang.envs.wordle.words import WORD_LENGTH, WordIndex, WordList, load_words, wordle_tokenizer
from torchrl_lang.schema import ACTION, AGENT_MASK, ATTENTION_MASK, TOKENS

_OPENERS = """
adieu aloes arise arose audio crane earls laser opera raise ratio reais reals roast
roate sauce saute shale share shine slate slice soare sooty stare suite tales tears
"""

OPENERS = tuple(_OPENERS.split())
"""The 28 opening words of the ILQL paper's code."""


class Player(TensorDictModuleBase):
    """A scripted policy for Wordle. Abstract: subclasses implement :meth:`choose`.

    It reads ``tokens``, ``attention_mask`` and ``agent_mask``, of any batch shape, and writes ``action``, int64
    ``[*B, action_length]``: a word, its end-of-action token, padding. It can be the policy of ``env.rollout`` and of
    collectors. It has its own random generator and can be sent to other processes: a copy continues with the same
    random numbers if a seed was given, otherwise it takes a new seed from the operating system.

    Args:
        action_length: width of the actions in tokens, at least 6: a word and its end.
        seed: seed of the random choices.

    Examples:
        >>> from torchrl_lang.envs.wordle import Player, WordIndex, WordleEnv
        >>> class Alternating(Player):
        ...     words = WordIndex(["crane", "slate"]).letters
        ...
        ...     def choose(self, turns):
        ...         return self.words[turns.tries % 2]
        >>> games = WordleEnv(["slate"], batch_size=[1]).rollout(2, Alternating())
        >>> [WordIndex.text(action) for action in games["action"][0, :, :5]]
        ['crane', 'slate']
    """

    @checked
    def __init__(
        self, *, action_length: Annotated[int, WORD_LENGTH + 1] = WORD_LENGTH + 1, seed: int | None = None
    ) -> None:
        super().__init__()
        self.in_keys = [TOKENS, ATTENTION_MASK, AGENT_MASK]
        self.out_keys = [ACTION]
        self.action_length = action_length
        self._tokenizer = wordle_tokenizer()
        self.stream = RandomStream(seed)

    @abstractmethod
    def choose(self, turns: Turns) -> Tensor:
        """The next word of each game, int64 letters ``[N, 5]``."""

    def probability(self, turns: Turns, letters: Tensor) -> Tensor:
        """The probability that the next word of each game is ``letters`` (int64 ``[N, 5]``), float64 ``[N]``."""
        raise NotImplementedError(f"{type(self).__name__} does not know the probabilities of its words.")

    def log_prob(self, rows: TensorDictBase) -> Tensor:
        """Log-probability of all guesses of finished games, float64 ``[N]``; ``-inf`` if this policy never plays one.

        Its negative mean over this policy's own games is the policy's entropy per game, which no imitation of the games
        can undercut. Guesses without colours are not counted.

        Args:
            rows: the entries of a row, ``[N, T]``.
        """
        turns = turns_of_rows(rows)
        total = torch.zeros(rows.shape, dtype=torch.float64, device=turns.tries.device)
        for turn in range(int(turns.answered.amax()) if len(rows) else 0):
            probability = self.probability(turns.until(turn), turns.guess[:, turn])
            total = total + torch.where(turn < turns.answered, probability, 1.0).log()
        return total

    def uniform(self, like: Tensor) -> Tensor:
        """A uniform number in ``[0, 1)`` for each entry of ``like``, float64."""
        return self.stream.uniform(tuple(like.shape)).to(like.device)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action`` into the tensordict."""
        tokens, attention, agent = (tensordict.get(key) for key in self.in_keys)
        rows = (entry.reshape(-1, entry.shape[-1]) for entry in (tokens, attention, agent))
        letters = self.choose(read_turns(*rows))
        control = self._tokenizer.control
        end = torch.full_like(letters[:, :1], control.end_of_action)
        spare = torch.full_like(letters[:, :1], control.pad).expand(-1, self.action_length)
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

    Examples:
        >>> from torchrl_lang.envs.wordle import WordIndex, WordleEnv
        >>> from torchrl_lang.envs.wordle.players import WordPlayer
        >>> class FirstFitting(WordPlayer):
        ...     def _choose_word(self, turns):
        ...         fitting = self.sets.members(turns.filter(self.sets))
        ...         return self.index.letters[fitting.int().argmax(-1)]
        >>> words = ["crane", "slate", "point"]
        >>> env = WordleEnv(words, batch_size=[3])
        >>> start = env.reset(hidden_word=[0, 1, 2])
        >>> actions = env.rollout(2, FirstFitting(words, openers=["point"]), auto_reset=False, tensordict=start,
        ...                       break_when_any_done=False)["action"]
        >>> [WordIndex.text(action) for action in actions[:2, 1, :5]]  # after the opener
        ['crane', 'slate']
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
        self.index = WordIndex(load_words(words))
        self.sets = CandidateSets(self.index.letters, rules)
        self.openers = None if openers is None else WordIndex(load_words(openers))

    @abstractmethod
    def _choose_word(self, turns: Turns) -> Tensor:
        """The next word of each game that does not play an opener, int64 letters ``[N, 5]``."""

    def choose(self, turns: Turns) -> Tensor:
        """An opener for first guesses, if there are openers, otherwise the word of :meth:`_choose_word`."""
        if self.openers is None:
            return self._choose_word(turns)
        letters = self.openers.letters[self.stream.below(torch.full_like(turns.tries, len(self.openers)))]
        later = turns.tries > 0
        if later.any():
            letters[later] = self._choose_word(turns.rows(later))
        return letters

    def probability(self, turns: Turns, letters: Tensor) -> Tensor:
        """See :meth:`Player.probability`."""
        later = self._probability(turns, letters)
        if self.openers is None:
            return later
        first = (self.openers.letters == letters[:, None]).all(-1).double().mean(-1)
        return torch.where(turns.tries == 0, first, later)

    def _probability(self, turns: Turns, letters: Tensor) -> Tensor:
        """The probability that :meth:`_choose_word` chooses the word ``letters``, float64 ``[N]``."""
        return super().probability(turns, letters)

    def chance_of(self, sets: Tensor, letters: Tensor) -> Tensor:
        """Probability of a word under :meth:`any_of` with a uniform word as the fallback, float64 ``[N]``."""
        size, word = self.sets.size(sets), self.index.find(letters)
        inside = self.sets.members(sets).gather(-1, word.clamp_min(0)[:, None]).squeeze(-1)
        chance = torch.where(size > 0, inside / size.clamp_min(1).double(), 1 / len(self.index))
        return torch.where(word < 0, 0.0, chance)

    def any_word(self, turns: Turns) -> Tensor:
        """Index of a uniform word of the list for each game, int64 ``[N]``."""
        return self.stream.below(torch.full_like(turns.tries, len(self.index)))

    def any_of(self, sets: Tensor, fallback: Tensor) -> Tensor:
        """Index of a uniform word of each set, int64 ``[N]``; ``fallback`` for empty sets."""
        size = self.sets.size(sets)
        drawn = self.sets.pick(sets, self.stream.below(size.clamp_min(1)))
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

    @checked
    def __init__(self, words: WordList | None = None, *, prob_smart: Unit = 0.0, **kwargs: Any) -> None:
        super().__init__(words, **kwargs)
        self.prob_smart = prob_smart

    def _choose_word(self, turns: Turns) -> Tensor:
        word = self.any_word(turns)
        if self.prob_smart > 0:
            smart = self.uniform(turns.tries) < self.prob_smart
            word[smart] = self.any_of(turns.rows(smart).filter(self.sets), fallback=word[smart])
        return self.index.letters[word]

    def _probability(self, turns: Turns, letters: Tensor) -> Tensor:
        mixed = self.prob_smart * self.chance_of(turns.filter(self.sets), letters)
        return torch.where(self.index.find(letters) < 0, 0.0, mixed + (1 - self.prob_smart) / len(self.index))


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
        return self.index.letters[self.any_of(self._excluded(turns), fallback=self.any_word(turns))]

    def _probability(self, turns: Turns, letters: Tensor) -> Tensor:
        return self.chance_of(self._excluded(turns), letters)

    def _excluded(self, turns: Turns) -> Tensor:
        return self.sets.all(turns.tries.shape[0]) & ~turns.filter(self.sets)


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

    @checked
    def __init__(self, words: WordList | None = None, *, first_n: Count | None = None, **kwargs: Any) -> None:
        super().__init__(words, **kwargs)
        self.first_n = first_n

    def _choose_word(self, turns: Turns) -> Tensor:
        letters = self.index.letters[self.any_word(turns)]
        known = turns.answered if self.first_n is None else turns.answered.clamp_max(self.first_n)
        which = self.stream.below(known.clamp_min(1))
        earlier = turns.guess[torch.arange(which.shape[0], device=which.device), which]
        return torch.where((known > 0)[:, None], earlier, letters)


class StartWordPlayer(WordPlayer):
    """Plays a uniform start word that fits all colours; if none fits, a uniform word of its list that does.

    The ILQL paper's start policy. The option ``openers`` of the other players plays such a word in the first turn only.

    Args:
        words: see :class:`WordPlayer`. If none of these fits either, any of them is played.
        starts: the start words, which need not be on the list; default :data:`OPENERS`.
        **kwargs: see :class:`WordPlayer`.

    Examples:
        >>> from torchrl_lang.envs.wordle import StartWordPlayer, WordIndex, WordleEnv
        >>> env = WordleEnv(["tummy"], batch_size=[2], seed=0)
        >>> player = StartWordPlayer(["tummy", "point"], starts=["slate", "roast"], seed=0)
        >>> guesses = env.rollout(2, player)["action"][0, :, :5]
        >>> [WordIndex.text(guess) for guess in guesses]
        ['roast', 'tummy']
    """

    def __init__(self, words: WordList | None = None, *, starts: Sequence[str] = OPENERS, **kwargs: Any) -> None:
        super().__init__(words, **kwargs)
        self.starts = WordIndex(load_words(starts))
        self.start_sets = CandidateSets(self.starts.letters, self.sets.rules)

    def _choose_word(self, turns: Turns) -> Tensor:
        starts = turns.filter(self.start_sets)
        size = self.start_sets.size(starts)
        fitting = self.start_sets.pick(starts, self.stream.below(size.clamp_min(1))).clamp_max(len(self.starts) - 1)
        other = self.any_of(turns.filter(self.sets), fallback=self.any_word(turns))
        return torch.where((size > 0)[:, None], self.starts.letters[fitting], self.index.letters[other])

    def _probability(self, turns: Turns, letters: Tensor) -> Tensor:
        starts = turns.filter(self.start_sets)
        size, start = self.start_sets.size(starts), self.starts.find(letters)
        fits = self.start_sets.members(starts).gather(-1, start.clamp_min(0)[:, None]).squeeze(-1) & (start >= 0)
        other = self.chance_of(turns.filter(self.sets), letters)
        return torch.where(size > 0, fits / size.clamp_min(1).double(), other)
