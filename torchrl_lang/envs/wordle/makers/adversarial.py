"""The mixture of section 5 of the ILQL paper: a good first guess whose average continuation is bad."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from torchrl_lang._random_stream import seeded_generators
from torchrl_lang.data import GameMaker, seed_of_games
from torchrl_lang.data.makers.base import Policy
from torchrl_lang.envs.wordle.env import WordleEnv
from torchrl_lang.envs.wordle.makers.continuing import (
    begin_games,
    continue_games,
    number_of_guesses,
    optimal_player,
    rows_before,
    sorted_by_game,
    tagged,
    task_notes,
    without_opening,
)
from torchrl_lang.envs.wordle.scripted_players import RandomWordPlayer, RepeatPlayer

__all__ = ["AdversarialGames"]

_OPENING = 2
"""Number of the expert's guesses that an adversarial game begins with."""


class AdversarialGames(GameMaker):
    """Games of an expert, adversarial continuations of them, and suboptimal games (arXiv 2206.11871, section 5).

    Of each expert game of three or more guesses, ``adversarial_games`` games begin with its first two guesses and are
    continued by an adversary, who repeats one of them. ``suboptimal_games`` games for each expert game are played from
    the beginning by a mixture of consistent and random words. So after the expert's first guesses most games are lost,
    and a method that averages over the data (single-step RL) ranks them below the suboptimal ones, while a multi-step
    method finds the expert's continuation.

    Rows have ``kind`` (0 expert, 1 adversarial, 2 suboptimal, :attr:`kinds`), ``game`` and ``branch_turn`` (2 in
    adversarial rows), as in :class:`~torchrl_lang.envs.wordle.BranchedGames`. Losses train on the expert's guesses of
    adversarial rows, too: without them there would be nothing to average over.

    Args:
        env: the environment, of any batch size; it is seeded and not closed.
        expert: default :class:`~torchrl_lang.envs.wordle.OptimalPlayer` with the paper's openers.
        adversary: default :class:`~torchrl_lang.envs.wordle.RepeatPlayer` with ``first_n=2``.
        suboptimal: default :class:`~torchrl_lang.envs.wordle.RandomWordPlayer` with ``prob_smart=0.5``.
        adversarial_games: number of adversarial games of each expert game of three or more guesses.
        suboptimal_games: number of suboptimal games for each expert game.
        train_on_opening: with False, a ``train_mask`` excludes the expert's guesses of adversarial rows.

    Raises:
        ValueError: a number is negative.

    Examples:
        >>> from torchrl_lang.envs.wordle import AdversarialGames, WordleEnv, demo_words
        >>> maker = AdversarialGames(WordleEnv(demo_words(50), batch_size=[16]), suboptimal_games=3)
        >>> rows = maker(range(10), seed=0)
        >>> [int((rows["kind"] == kind).sum()) for kind in (0, 2)]
        [10, 30]
    """

    kinds = ("expert", "adversarial", "suboptimal")
    """Names of the kinds, in the order of their numbers."""

    def __init__(
        self,
        env: WordleEnv,
        expert: Policy | None = None,
        adversary: Policy | None = None,
        suboptimal: Policy | None = None,
        *,
        adversarial_games: int = 5,
        suboptimal_games: int = 5,
        train_on_opening: bool = True,
    ) -> None:
        if min(adversarial_games, suboptimal_games) < 0:
            raise ValueError(
                f"adversarial_games and suboptimal_games are at least 0, got {adversarial_games}, {suboptimal_games}."
            )
        super().__init__(env.tokenizer, env.row_length)
        options: Any = {"rules": env.rules, "action_length": env.action_length}
        self.env, self.train_on_opening = env, train_on_opening
        self.adversarial_games, self.suboptimal_games = adversarial_games, suboptimal_games
        self.expert = optimal_player(env) if expert is None else expert
        self.adversary = RepeatPlayer(env.words, first_n=_OPENING, **options) if adversary is None else adversary
        mixed = RandomWordPlayer(env.words, prob_smart=0.5, **options)
        self.suboptimal = mixed if suboptimal is None else suboptimal

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See :meth:`~torchrl_lang.data.GameMaker.__call__`; the numbers are those of the expert's games."""
        seed, game = seed_of_games(seed, numbers), torch.arange(numbers.start, numbers.stop)
        with seeded_generators(seed, self.expert, self.adversary, self.suboptimal):
            self.env.set_seed(seed)
            expert = begin_games(self.env, self.expert, len(numbers))
            every = [tagged(expert, 0, game)]
            long = (number_of_guesses(expert) > _OPENING).nonzero().flatten()
            long = long.repeat_interleave(self.adversarial_games)
            if len(long):
                states = rows_before(expert[long], torch.full_like(long, _OPENING))
                every.append(tagged(continue_games(self.env, self.adversary, states), 1, game[long], _OPENING))
            if self.suboptimal_games:
                others = begin_games(self.env, self.suboptimal, len(numbers) * self.suboptimal_games)
                every.append(tagged(others, 2, game.repeat_interleave(self.suboptimal_games)))
        rows = sorted_by_game(every)
        return rows if self.train_on_opening else without_opening(rows)

    def notes(self) -> dict[str, Any]:
        """See :meth:`~torchrl_lang.data.GameMaker.notes`."""
        named = {"expert": self.expert, "adversary": self.adversary, "suboptimal": self.suboptimal}
        players = {name: type(player).__name__ for name, player in named.items()}
        games = {"adversarial_games": self.adversarial_games, "suboptimal_games": self.suboptimal_games}
        kinds = {"kinds": list(self.kinds), "train_on_opening": self.train_on_opening}
        return {**task_notes(self.env), **super().notes(), **kinds, **players, **games}
