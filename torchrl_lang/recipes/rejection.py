"""Rejection sampling and expert iteration: imitate the best games of the current policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase

from torchrl_lang.data import BestRows, best_rows
from torchrl_lang.objectives import BCLoss
from torchrl_lang.recipes.algorithms import Rejection
from torchrl_lang.recipes.initial_policy import InitialPolicy, load_initial_policy
from torchrl_lang.recipes.online import Learner, kl_transform, train_online
from torchrl_lang.training import Stateful
from torchrl_lang.transforms import KLController

__all__ = ["BestGames", "Rejection", "main"]


class BestGames(Learner):
    """Imitates the games with the best return after the KL penalty, of this iteration or of all.

    The selection alone does not limit how far the policy moves, so the BC loss has a KL term with the same coefficient.
    """

    def __init__(self, options: Rejection, start: InitialPolicy, controller: KLController) -> None:
        self.loss = BCLoss(
            start.policy,
            actor_normalizer="action",
            kl_weight=controller if options.kl_coef else 0.0,
            reference=start.reference if options.kl_coef else None,
        )
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

    def parts(self) -> Mapping[str, Stateful]:
        """The best games so far."""
        return {} if self.pool is None else {"pool": self.pool}


def main(options: Rejection) -> float:
    """Train; returns the best mean return."""
    start = load_initial_policy(options)
    kl = kl_transform(options, start)
    return train_online(options, start, kl, BestGames(options, start, kl.controller))
