"""A policy for Wordle that plays each game to its end many times and picks the best first guess."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one
from torchrl_lang.envs.wordle.candidate_sets import CandidateSets
from torchrl_lang.envs.wordle.rules import SOLVED, Rules, answer, colours_of_codes
from torchrl_lang.envs.wordle.scripted_players import Player
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import WORD_LENGTH, WordIndex, WordList, common_words, load_words, word_number

__all__ = ["MonteCarloPlayer"]


class MonteCarloPlayer(Player):
    """Plays the first guess of another player whose simulated games had the largest mean return.

    From the state of each game, ``samples`` games are played to their end by ``player``, each with a hidden word drawn
    uniformly from those that agree with all colours. Equal first guesses share their games; of equal means the guess
    that was drawn first is played. All games of a batch are simulated together. If no word agrees with the colours, the
    player's own guess is played.

    It improves on ``player`` by one step of policy iteration, as far as ``samples`` games show the difference.

    Args:
        player: the sampling player, of any kind.
        words: the words that may be hidden, a list or path; default the shipped common words. Every word of five
            letters is a valid guess.
        samples: games from each state.
        rules: the rules of the colours.
        max_tries: number of guesses in a game.
        seed: seed of the hidden words; ``player`` has its own.

    Raises:
        ValueError: ``samples`` or ``max_tries`` is below 1, or a word list is invalid.

    Examples:
        >>> from torchrl_lang.envs.wordle import MonteCarloPlayer, RandomWordPlayer, WordleEnv, demo_words
        >>> words = demo_words(50)
        >>> player = MonteCarloPlayer(RandomWordPlayer(words, prob_smart=1.0, seed=0), words, samples=10, seed=1)
        >>> env = WordleEnv(words, batch_size=[16], seed=0)
        >>> env.rollout(3, player, break_when_any_done=False)["action"].shape
        torch.Size([16, 3, 6])
    """

    _colours: Tensor

    def __init__(
        self,
        player: Player,
        words: WordList | None = None,
        *,
        samples: int = 10,
        rules: Rules = "official",
        max_tries: int = 6,
        seed: int | None = None,
    ) -> None:
        super().__init__(action_length=player.action_length, seed=seed)
        at_least_one("samples", samples)
        at_least_one("max_tries", max_tries)
        self.player, self.samples, self.max_tries = player, samples, max_tries
        self.index = WordIndex(common_words() if words is None else load_words(words))
        self.sets = CandidateSets(self.index.letters, rules)
        self.register_buffer("_colours", colours_of_codes(), persistent=False)

    def choose(self, turns: Turns) -> Tensor:
        """The best first guess of the simulated games of each row, int64 letters ``[N, 5]``."""
        n = turns.tries.shape[0]
        sets = turns.filter(self.sets)
        copy = torch.arange(n, device=turns.tries.device).repeat_interleave(self.samples)
        size = self.sets.size(sets)
        hidden = self.sets.pick(sets[copy], self.stream.below(size.clamp_min(1)[copy]))
        first, returns = self._simulate(turns.rows(copy), self.index.letters[hidden.clamp_max(len(self.index) - 1)])
        guess = word_number(first).view(n, self.samples)
        same = (guess[:, :, None] == guess[:, None, :]).double()
        mean = (same @ returns.view(n, self.samples, 1)).squeeze(-1) / same.sum(-1)
        best = torch.where(size > 0, mean.argmax(-1), 0)
        return first.view(n, self.samples, WORD_LENGTH)[torch.arange(n, device=best.device), best]

    def _simulate(self, turns: Turns, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Play to the end: the first guesses, int64 ``[R, 5]``, and the returns from here, float64 ``[R]``."""
        row = torch.arange(hidden.shape[0], device=hidden.device)
        spare = torch.zeros_like(turns.guess[:, :1]).expand(-1, self.max_tries, -1)
        turns = turns._replace(guess=torch.cat([turns.guess, spare], 1), colours=torch.cat([turns.colours, spare], 1))
        returns = torch.zeros_like(row, dtype=torch.float64)
        live = torch.ones_like(row, dtype=torch.bool)
        first: Tensor | None = None
        while first is None or bool(live.any()):
            # Finished games stay in their places, as players that store something for each row expect.
            guess = self.player.choose(turns)
            first = guess if first is None else first
            code = answer(guess, hidden, self.sets.rules).long()
            turns.guess[row[live], turns.answered[live]] = guess[live]
            turns.colours[row[live], turns.answered[live]] = self._colours[code[live]]
            turns = turns._replace(answered=turns.answered + live, tries=turns.tries + live)
            live = live & (code != SOLVED)
            returns -= live.double()
            live &= turns.tries < self.max_tries
        return first, returns
