"""Rejection sampling and expert iteration: imitate the best of the games that the policy itself plays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from torchrl_lang.data import BestRows, best_rows
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.online import begin, keep_near, train_online
from torchrl_lang.recipes.online_options import OnlineOptions
from torchrl_lang.recipes.options import option
from torchrl_lang.recipes.start import Start
from torchrl_lang.training import Stateful
from torchrl_lang.transforms import KLController

__all__ = ["BestGames", "Rejection", "TextWorldRejection", "main"]


@dataclass(frozen=True)
class Rejection(OnlineOptions):
    """Imitation of the best games that the policy plays: rejection sampling, or expert iteration, near the start."""

    # Choosing well takes many games at a time; what was chosen can be learned from often, since a price keeps it near.
    iterations: int = option(40, "times of playing and learning")
    games: int = option(2048, "games played side by side")
    epochs: int = option(4, "times that each game is learned from")
    lr: float = option(1e-3, "peak learning rate of AdamW; Muon's is ten times that")
    kl_coef: float = option(0.1, "what a nat of divergence from the start costs, at first")
    kl_target: float | None = option(6.0, "divergence sought, in nats a game; none keeps the coefficient as it is")
    kl_horizon: int = option(4000, "games over which the coefficient may change by a fifth")
    eval_every: int = option(10, "iterations between evaluations, each with a checkpoint")
    fraction: float = option(0.2, "share of the games just played that is imitated")
    best_so_far: int | None = option(None, "keep so many of the best games ever played, and imitate those instead")
    turn_gamma: float = option(1.0, "discount of a turn in the ranking")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 1:
            raise ValueError(f"Imitation is at temperature 1, got {self.temperature}: it would learn what nobody said.")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must lie in (0, 1], got {self.fraction}: 0.1 imitates the best tenth.")
        if self.best_so_far is not None and self.best_so_far < 1:
            raise ValueError(f"best_so_far must be at least 1 game, got {self.best_so_far}.")


@dataclass(frozen=True)
class TextWorldRejection(Rejection):
    """Imitation of the best games that the policy plays in TextWorld, near to a run that imitates experts."""

    iterations: int = option(30, "times of playing and learning")
    games: int = option(192, "games played side by side")
    turns: int = option(12, "turns of each of them between two updates")
    epochs: int = option(2, "times that each game is learned from")
    batch_size: int = option(32, "games in a batch")
    lr: float = option(2e-4, "peak learning rate of AdamW; Muon's is ten times that")
    kl_target: float | None = option(2.0, "divergence sought, in nats a game; none keeps the coefficient as it is")
    kl_horizon: int = option(1000, "games over which the coefficient may change by a fifth")
    eval_games: int = option(96, "games an evaluation")
    fraction: float = option(0.5, "share of the games just played that is imitated")
    turn_gamma: float = option(0.95, "discount of a turn in the ranking")


class BestGames:
    """The best games, of those just played or of all so far, by their return less what their divergence costs.

    Which games are chosen says little about how far the policy goes; so imitation pays for the divergence as well, at
    the same price.
    """

    def __init__(self, options: Rejection, start: Start, price: KLController) -> None:
        self.loss = BCLoss(
            start.policy,
            actor_normalizer="action",
            kl_weight=price if options.kl_coef else 0.0,
            reference=start.reference.frozen if options.kl_coef else None,
        )
        self.rates = ()
        self.fraction = options.fraction
        self.ranking: dict[str, Any] = {
            "gamma": options.turn_gamma,
            "end_of_action": start.tokenizer.control.end_of_action,
        }
        self.pool = None if options.best_so_far is None else BestRows(options.best_so_far, **self.ranking)

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The games to imitate."""
        if self.pool is None:
            return best_rows(rows, fraction=self.fraction, **self.ranking)
        return self.pool.extend(rows).rows

    def losses(self, batch: TensorDictBase, iteration: int) -> TensorDictBase:
        """Those of imitation."""
        return self.loss(batch)

    def moves_policy(self, iteration: int) -> bool:
        """Always."""
        return True

    def parts(self) -> Mapping[str, Stateful]:
        """The games that are kept."""
        return {} if self.pool is None else {"pool": self.pool}


def main(options: Rejection) -> float:
    """Train; returns the best mean return."""
    start = begin(options)
    near = keep_near(options, start)
    return train_online(options, start, near, BestGames(options, start, near.controller))
