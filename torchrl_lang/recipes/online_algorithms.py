"""Online algorithms: PPO, and rejection sampling or expert iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data import BestRows, best_rows
from torchrl_lang.functional.value_terms import explained_variance
from torchrl_lang.modules import value_module
from torchrl_lang.objectives import BCLoss, PPOLoss
from torchrl_lang.recipes.algorithms import PPO, Rejection
from torchrl_lang.recipes.models import loss_options
from torchrl_lang.recipes.online import InitialPolicy, Learner, kl_transform, load_initial_policy, train_online
from torchrl_lang.schema import FROZEN_STATES
from torchrl_lang.training.checkpoint import Stateful
from torchrl_lang.transforms import KLController


class PPOLearner(Learner):
    """Learns from all games, with the log-probabilities and values that the policy wrote while acting."""

    def __init__(self, options: PPO, start: InitialPolicy) -> None:
        self.detach_value = options.detach_value
        self.value_warmup = min(options.value_warmup, options.iterations // 3)
        self.value, self.rates = start.value, ((start.value, options.value_lr),)
        self.loss = PPOLoss(start.policy, value_module(start.value), **loss_options(options, PPOLoss))

    @torch.no_grad()
    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows with their advantages.

        Values that begin at zero are set to the mean return of the first games: to learn their level from targets that
        bootstrap from them takes iterations.
        """
        values = rows.get("state_value")  # NaN where there was no choice
        if self.value.normalize and not self.value.out_weight.any():
            level = rows.get("token_reward").sum(-1).mean()
            self.value.out_bias.fill_(level)
            values = values + level
        rows = self.loss.estimate(rows.copy().set("state_value", values), reuse_values=True)
        counted = rows.get("agent_mask") & values.isfinite()
        self._explained = explained_variance(values, rows.get("value_target"), counted)
        return rows

    def metrics(self) -> Mapping[str, Tensor]:
        """How well the values before the updates of an iteration explain its value targets."""
        return {"explained_variance": self._explained}

    def losses(self, batch: TensorDictBase, iteration: int) -> TensorDictBase:
        """All losses; only the value loss during the value warmup."""
        trains_policy = self.trains_policy(iteration)
        self.loss.detach_value = self.detach_value or not trains_policy
        losses = self.loss(batch)
        return losses if trains_policy else losses.select("loss_critic", "explained_variance")

    def trains_policy(self, iteration: int) -> bool:
        """Whether the value warmup is over."""
        return iteration > self.value_warmup


def train_ppo(options: PPO) -> float:
    """Train; returns the best mean return."""
    start = load_initial_policy(options)
    return train_online(options, start, kl_transform(options, start), PPOLearner(options, start))


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
        end = start.tokenizer.control.end_of_action
        self.ranking: dict[str, Any] = {"gamma": options.turn_gamma, "end_of_action": end}
        self.pool = None if options.best_so_far is None else BestRows(options.best_so_far, **self.ranking)

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The games to imitate."""
        if self.pool is None:
            return best_rows(rows, fraction=self.fraction, **self.ranking)
        return self.pool.extend(rows.exclude(FROZEN_STATES)).rows  # a checkpoint has the pool

    def parts(self) -> Mapping[str, Stateful]:
        """The best games so far."""
        return {} if self.pool is None else {"pool": self.pool}


def train_rejection(options: Rejection) -> float:
    """Train; returns the best mean return."""
    start = load_initial_policy(options)
    kl = kl_transform(options, start)
    return train_online(options, start, kl, BestGames(options, start, kl.controller))
