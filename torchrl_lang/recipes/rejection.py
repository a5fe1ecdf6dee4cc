"""Rejection sampling and expert iteration: imitate the best of the games that the policy itself plays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from torchrl_lang.data import BestRows, best_rows
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.online import begin, keep_near, train_online
from torchrl_lang.recipes.online_options import OnlineOptions
from torchrl_lang.recipes.options import option, with_defaults
from torchrl_lang.recipes.start import Start
from torchrl_lang.training import Stateful
from torchrl_lang.transforms import KLController

__all__ = ["BestGames", "Rejection", "TextWorldRejection", "main"]


# Choosing well takes many games at a time; what was chosen can be learned from often, since a price keeps it near.
@with_defaults(iterations=40, games=2048, epochs=4, lr=1e-3, kl_coef=0.1, kl_target=6.0, kl_horizon=4000, eval_every=10)
class Rejection(OnlineOptions):
    """Imitation of the best games that the policy plays: rejection sampling, or expert iteration, near the start."""

    fraction: float = option(0.2, "share of the games just played that is imitated", above=0, at_most=1)
    best_so_far: int | None = option(
        None, "keep so many of the best games ever played, and imitate those instead", at_least=1
    )
    turn_gamma: float = option(1.0, "discount of a turn in the ranking", at_least=0, at_most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature != 1:
            raise ValueError(f"Imitation is at temperature 1, got {self.temperature}: it would learn what nobody said.")


@with_defaults(
    iterations=30,
    games=192,
    turns=12,
    epochs=2,
    batch_size=32,
    lr=2e-4,
    kl_target=2.0,
    kl_horizon=1000,
    eval_games=96,
    fraction=0.5,
    turn_gamma=0.95,
)
class TextWorldRejection(Rejection):
    """Imitation of the best games that the policy plays in TextWorld, near to a run that imitates experts."""


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
