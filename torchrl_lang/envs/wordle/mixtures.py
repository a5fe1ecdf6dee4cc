"""Scripted policies for Wordle that are made of others: mixtures, and Monte Carlo search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import Count, checked
from torchrl_lang.envs.wordle.players import Player
from torchrl_lang.envs.wordle.rules import SOLVED, CandidateSets, Rules, answer, colours_of_codes
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import WORD_LENGTH, WordIndex, WordList, load_words, word_number


class MixturePlayer(Player):
    """Plays as one of several policies, drawn for each move or for each game.

    With ``per="game"`` it stores the policy of each row of the batch and draws again for rows that begin. So give it
    whole batches whose rows stay in place, as rollouts and collectors do. A batch of another size draws all again.

    Args:
        players: the policies; actions are as wide as those of the first.
        probabilities: the probability of each, summing to one; equal by default.
        per: ``"move"`` or ``"game"``.
        seed: seed of the draw of policies, which have their own seeds.

    Raises:
        ValueError: ``players`` is empty, or the probabilities are invalid.

    Examples:
        >>> from torchrl_lang.envs.wordle import MixturePlayer, RandomWordPlayer, WordleEnv, WrongPlayer
        >>> words = ["crane", "slate", "point"]
        >>> players = [RandomWordPlayer(words, prob_smart=1.0, seed=0), WrongPlayer(words, seed=1)]
        >>> mixture = MixturePlayer(players, [0.75, 0.25], per="game", seed=2)
        >>> env = WordleEnv(words, batch_size=[8], seed=0)
        >>> env.rollout(2, mixture, break_when_any_done=False)["action"].shape
        torch.Size([8, 2, 6])
    """

    @checked
    def __init__(
        self,
        players: Sequence[Player],
        probabilities: Sequence[float] | None = None,
        *,
        per: Literal["move", "game"] = "move",
        seed: int | None = None,
    ) -> None:
        n = len(players)
        chances = [1 / n for _ in players] if probabilities is None else list(probabilities)
        if len(chances) != n or not (n and min(chances) >= 0 and abs(sum(chances) - 1) <= 1e-6):  # also of NaN
            raise ValueError(f"{n} players need as many probabilities that sum to one, got {chances}.")
        super().__init__(action_length=players[0].action_length, seed=seed)
        self.players = torch.nn.ModuleList(players)
        self.per, self._weighted = per, list(zip(chances, players, strict=True))
        self.register_buffer("_upto", torch.tensor(chances, dtype=torch.float64).cumsum(0)[:-1], persistent=False)
        self._playing: Tensor | None = None

    def begin_games(self) -> None:
        """Draw the policy of each row again at the next move, also of games that others have begun."""
        self._playing = None

    def choose(self, turns: Turns) -> Tensor:
        """The word of the policy drawn for each game, int64 letters ``[N, 5]``."""
        who = torch.searchsorted(self._upto, self.uniform(turns.tries), right=True)
        if self.per == "game":
            if self._playing is not None and self._playing.shape == who.shape:
                who = torch.where(turns.tries == 0, who, self._playing)
            self._playing = who
        letters = torch.zeros_like(turns.guess[:, 0])
        for number, (_, player) in enumerate(self._weighted):
            mine = who == number
            if mine.any():
                letters[mine] = player.choose(turns.rows(mine))
        return letters

    def probability(self, turns: Turns, letters: Tensor) -> Tensor:
        """With ``per="move"`` the mean of the policies' probabilities, see :meth:`Player.probability`."""
        if self.per == "game":
            raise ValueError("With per='game' a word's probability depends on the game's policy: use log_prob(rows).")
        return torch.stack([chance * player.probability(turns, letters) for chance, player in self._weighted]).sum(0)

    def log_prob(self, rows: TensorDictBase) -> Tensor:
        """Log-probability of finished games, see :meth:`Player.log_prob`."""
        if self.per == "move":
            return super().log_prob(rows)
        each = [math.log(chance) + player.log_prob(rows) for chance, player in self._weighted if chance > 0]
        return torch.stack(each).logsumexp(0)


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

    @checked
    def __init__(
        self,
        player: Player,
        words: WordList | None = None,
        *,
        samples: Count = 10,
        rules: Rules = "official",
        max_tries: Count = 6,
        seed: int | None = None,
    ) -> None:
        super().__init__(action_length=player.action_length, seed=seed)
        self.player, self.samples, self.max_tries = player, samples, max_tries
        self.index = WordIndex(load_words(words))
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
