"""A scripted policy for Wordle that mixes others, by move or by game."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.envs.wordle.scripted_players import Player
from torchrl_lang.envs.wordle.transcript import Turns

__all__ = ["MixturePlayer"]


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
        are_chances = all(chance >= 0 for chance in chances) and abs(sum(chances) - 1) <= 1e-6  # False with NaN
        if len(chances) != len(players) or not are_chances:
            raise ValueError(f"{len(players)} players need as many probabilities that sum to one, got {chances}.")
        one_of("per", per, ("move", "game"))
        self.players = torch.nn.ModuleList(players)
        self.per, self._chances = per, chances
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
        for number, player in enumerate(self.players):
            assert isinstance(player, Player)
            mine = who == number
            if mine.any():
                letters[mine] = player.choose(turns.rows(mine))
        return letters

    def probability(self, turns: Turns, letters: Tensor) -> Tensor:
        """With ``per="move"`` the mean of the policies' probabilities, see :meth:`Player.probability`."""
        if self.per == "game":
            raise ValueError("With per='game' a word's probability depends on the game's policy: use log_prob(rows).")
        each = [chance * player.probability(turns, letters) for chance, player in self._weighted()]
        return torch.stack(each).sum(0)

    def log_prob(self, rows: TensorDictBase) -> Tensor:
        """Log-probability of finished games, see :meth:`Player.log_prob`."""
        if self.per == "move":
            return super().log_prob(rows)
        each = [math.log(chance) + player.log_prob(rows) for chance, player in self._weighted() if chance > 0]
        return torch.stack(each).logsumexp(0)

    def _weighted(self) -> Iterator[tuple[float, Player]]:
        return zip(self._chances, cast(Iterable[Player], self.players), strict=True)
