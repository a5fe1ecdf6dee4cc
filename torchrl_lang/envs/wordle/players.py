"""Players whose games make a data set: random ones, wrong ones, ones that repeat themselves, and mixtures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_lang.envs.wordle.player import Player, WordPlayer
from torchrl_lang.envs.wordle.transcript import Turns
from torchrl_lang.envs.wordle.words import WordList

__all__ = ["MixturePlayer", "RandomWordPlayer", "RepeatPlayer", "WrongPlayer"]


class RandomWordPlayer(WordPlayer):
    """Plays any word of its list, or with some probability one that agrees with all colours.

    Args:
        words: see :class:`WordPlayer`.
        prob_smart: probability of a guess drawn uniformly from the words that agree with all colours, where there are
            any; else the guess is uniform over all words.
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
    """Plays a uniform word among those that the colours rule out, or among all where none is.

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
    """Opens with a uniform word (or opener), then repeats its earlier guesses, drawn uniformly.

    Args:
        words: see :class:`WordPlayer`.
        first_n: repeats only the first so many guesses of the game; all by default.
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
            raise ValueError(f"first_n must be at least 1 guess or None, got {first_n}.")
        self.first_n = first_n

    def _choose_word(self, turns: Turns) -> Tensor:
        letters = self.index.letters[self.any_word(turns)]
        known = turns.answered if self.first_n is None else turns.answered.clamp_max(self.first_n)
        which = self.below(known.clamp_min(1))
        earlier = turns.guess[torch.arange(which.shape[0], device=which.device), which]
        return torch.where((known > 0)[:, None], earlier, letters)


class MixturePlayer(Player):
    """Plays as one of several players, drawn anew for each move or once a game.

    With ``per="game"`` it remembers who plays which row of the batch and draws again where a row is fresh, so give it
    whole batches whose rows stay in place, as rollouts and collectors do. A batch of another size begins anew.

    Args:
        players: the players.
        probabilities: the probability of each, summing to one; equal by default.
        per: ``"move"`` or ``"game"``.
        seed: seed of the draw of players; they have their own for their choices.

    Raises:
        ValueError: there is no player, the probabilities do not fit, or the players' actions differ in width.

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
        """The word of the player drawn for each game, int64 letters ``[N, 5]``."""
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
