"""Online algorithms: PPO, its relatives without a critic, and rejection sampling or expert iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_lang.data import BestRows, best_rows
from torchrl_lang.functional.decisions import begins_utterance
from torchrl_lang.functional.value_terms import explained_variance
from torchrl_lang.modules import value_module
from torchrl_lang.objectives import BCLoss, PPOLoss
from torchrl_lang.recipes.algorithms import GRPO, PPO, Rejection
from torchrl_lang.recipes.algorithms.online import RatioOptions
from torchrl_lang.recipes.models import loss_options
from torchrl_lang.recipes.online import InitialPolicy, Learner, train_online
from torchrl_lang.schema import AGENT_MASK, FROZEN_STATES, TOKENS
from torchrl_lang.training.checkpoint import Stateful
from torchrl_lang.transforms import KLController, RowAdvantage

_PATIENCE = 200
"""Batches without a whole group, after which an iteration learns nothing."""


def ppo_options(options: RatioOptions, start: InitialPolicy, controller: KLController | None) -> dict[str, Any]:
    """The keyword arguments of PPOLoss; ``controller`` is that of a KL in the loss."""
    high = options.clip_epsilon if options.clip_high is None else options.clip_high
    more: dict[str, Any] = {"clip_epsilon": (options.clip_epsilon, high)}
    if options.kl_weight:
        more["kl_weight"] = controller
    if options.aggregation == "constant":
        more["aggregation"] = options.turns * start.task.action_length
    return loss_options(options, PPOLoss, **more)


class PPOLearner(Learner):
    """Learns from all games, with the log-probabilities and values that the policy wrote while acting."""

    def __init__(self, options: PPO, start: InitialPolicy, controller: KLController | None = None) -> None:
        self.penalizes, self.detach_value = bool(options.kl_weight), options.detach_value
        self.value_warmup = min(options.value_warmup, options.iterations // 3)
        self.value, self.rates = start.value, ((start.value, options.value_lr),)
        self.end = start.tokenizer.control.end_of_action
        self.loss = PPOLoss(start.policy, value_module(start.value), **ppo_options(options, start, controller))

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
        agent = rows.get(AGENT_MASK)
        valued = begins_utterance(agent, rows.get(TOKENS) == self.end) if self.loss.turn_values else agent
        counted = valued & values.isfinite()
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
    return train_online(options, PPOLearner)


class GroupLearner(Learner):
    """Learns from games whose returns are compared with each other, without values."""

    def __init__(self, options: GRPO, start: InitialPolicy, controller: KLController | None = None) -> None:
        given = ppo_options(options, start, controller)
        del given["turn_gamma"]  # it is that of the advantages
        self.penalizes, self.loss = bool(options.kl_weight), PPOLoss(start.policy, **given)
        self.advantage = RowAdvantage(
            options.advantage,
            options.group_size,
            gamma=options.turn_gamma,
            anchor=options.anchor,
            weight=options.state_weight,
            drop_equal=options.drop_equal,
            end_of_action=start.tokenizer.control.end_of_action,
        )
        self.continues = options.collector == "single"
        self.wanted = {"groups": 1, "limit": _PATIENCE}
        if options.drop_equal:
            self.wanted = {"groups": options.games // options.group_size, "limit": options.draw_limit}

    def draw(self, play: Callable[[], TensorDictBase]) -> TensorDictBase:
        """The rows of whole groups with their advantages; other rows wait, and are in checkpoints."""
        return self.advantage.draw(lambda: play().exclude(FROZEN_STATES), **self.wanted)

    def parts(self) -> Mapping[str, Stateful]:
        """The rows that wait for their groups. Resumed workers play other games: theirs would never be complete."""
        return {"advantage": self.advantage} if self.continues else {}

    def restart(self) -> None:
        """Drop the rows whose groups will not be completed."""
        self.advantage.waiting = None


def train_without_critic(options: GRPO) -> float:
    """Train; returns the best mean return."""
    return train_online(options, GroupLearner)


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
    return train_online(options, BestGames)
