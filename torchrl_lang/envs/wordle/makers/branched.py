"""Branched games: from every state of an expert's game another player takes over."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from torchrl_lang._checks import at_least_one
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
from torchrl_lang.envs.wordle.scripted_players import WrongPlayer

__all__ = ["BranchedGames"]


class BranchedGames(GameMaker):
    """Games of an expert, and from every state of each game ``branches`` games in which a suboptimal player continues.

    A branch begins with the expert's guesses and their colours and continues from there, with a hidden word drawn from
    those that fit the colours (see :func:`~torchrl_lang.envs.wordle.continue_games`). (The ILQL paper's released code
    begins a new game instead.) Beside the entries of rows there are:

    ===============  ================  ===============================================================================
    key              dtype, shape      meaning
    ===============  ================  ===============================================================================
    ``kind``         int64 ``[N]``     0 the expert's game, 1 a branch (:attr:`kinds`)
    ``game``         int64 ``[N]``     the number of the expert's game; its rows are adjacent, the expert's own first
    ``branch_turn``  int64 ``[N]``     number of the expert's guesses that a branch begins with; 0 in the expert's rows
    ``train_mask``   bool ``[N, T]``   False on those guesses; only if not ``train_on_opening``
    ===============  ================  ===============================================================================

    The expert's guesses stay in ``agent_mask``, so a branch is a complete row of the game with all its rewards. Losses
    exclude them by ``train_mask``, because the expert's row has them already; to include them, exclude the entry:
    ``rows.exclude("train_mask")``.

    Args:
        env: the environment, of any batch size; it is seeded and not closed.
        expert: plays the whole games; default :class:`~torchrl_lang.envs.wordle.OptimalPlayer` with the paper's
            openers.
        suboptimal: plays the branches; default :class:`~torchrl_lang.envs.wordle.WrongPlayer`.
        branches: number of branches of each state.
        train_on_opening: write no ``train_mask``.

    Raises:
        ValueError: ``branches`` is below 1.

    Examples:
        >>> from torchrl_lang.envs.wordle import BranchedGames, WordleEnv
        >>> maker = BranchedGames(WordleEnv(["crane", "slate", "point", "crate"], batch_size=[8]), branches=2)
        >>> rows = maker(range(3), seed=0)
        >>> rows["game"].unique().tolist(), int((rows["kind"] == 0).sum())
        ([0, 1, 2], 3)
        >>> states = rows["branch_turn"][rows["game"] == 0].tolist()
        >>> states[:3]  # the expert's game, and two branches from its beginning
        [0, 0, 0]
    """

    kinds = ("expert", "branch")
    """Names of the kinds, in the order of their numbers."""

    def __init__(
        self,
        env: WordleEnv,
        expert: Policy | None = None,
        suboptimal: Policy | None = None,
        *,
        branches: int = 1,
        train_on_opening: bool = False,
    ) -> None:
        at_least_one("branches", branches)
        super().__init__(env.tokenizer, env.row_length)
        self.env, self.branches, self.train_on_opening = env, branches, train_on_opening
        self.expert = optimal_player(env) if expert is None else expert
        wrong = WrongPlayer(env.words, rules=env.rules, action_length=env.action_length)
        self.suboptimal = wrong if suboptimal is None else suboptimal

    def __call__(self, numbers: range, seed: int) -> TensorDict:
        """See :meth:`~torchrl_lang.data.GameMaker.__call__`; the numbers are those of the expert's games."""
        seed = seed_of_games(seed, numbers)
        with seeded_generators(seed, self.expert, self.suboptimal):
            self.env.set_seed(seed)
            expert = begin_games(self.env, self.expert, len(numbers))
            states = number_of_guesses(expert)
            row = torch.arange(len(expert)).repeat_interleave(states)
            turn = torch.arange(len(row)) - (states.cumsum(0) - states)[row]
            row, turn = row.repeat_interleave(self.branches), turn.repeat_interleave(self.branches)
            branches = continue_games(self.env, self.suboptimal, rows_before(expert[row], turn))
        game = torch.arange(numbers.start, numbers.stop)
        rows = sorted_by_game([tagged(expert, 0, game), tagged(branches, 1, game[row], turn)])
        return rows if self.train_on_opening else without_opening(rows)

    def notes(self) -> dict[str, Any]:
        """See :meth:`~torchrl_lang.data.GameMaker.notes`."""
        players = {"expert": type(self.expert).__name__, "suboptimal": type(self.suboptimal).__name__}
        options = {"branches": self.branches, "train_on_opening": self.train_on_opening}
        return {**task_notes(self.env), **super().notes(), "kinds": list(self.kinds), **players, **options}
