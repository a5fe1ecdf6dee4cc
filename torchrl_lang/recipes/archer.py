"""ArCHer (arXiv 2402.19446): the games of all iterations teach a critic of utterances, which teaches the policy."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import SoftUpdate

from torchrl_lang import _ranks
from torchrl_lang.data import LatestRows, row_buffer
from torchrl_lang.modules import (
    UtteranceQValueHead,
    ValueHead,
    draw_utterances,
    qvalue_module,
    value_module,
    with_drawn,
)
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.hugging_face import hidden_size
from torchrl_lang.objectives import ArCHerLoss, PPOLoss
from torchrl_lang.recipes.algorithms import ArCHer
from torchrl_lang.recipes.models import loss_options
from torchrl_lang.recipes.online import InitialPolicy, Learner, gather_rows, train_online
from torchrl_lang.recipes.runs import TrainableState
from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, FEATURES, FEATURES_MASK, RAW_REWARD, TERMINATED, TOKENS
from torchrl_lang.training import adamw, train_steps, warmup_cosine
from torchrl_lang.training.checkpoint import Stateful
from torchrl_lang.training.metrics import mean_figures
from torchrl_lang.transforms import KLController

_KEPT = (TOKENS, ATTENTION_MASK, AGENT_MASK, TERMINATED, FEATURES, FEATURES_MASK)
_SHOWN = ("qvalue", "value", "explained_variance")
_HEADS = ("qvalue_network", "value_network")


class ArCHerLearner(Learner):
    """A critic that is a model of its own, and the policy, which learns from utterances that it draws.

    Rewards are the task's own: a penalty on rewards would be that of the policy which played. The policy's loss has the
    KL term instead, with the same coefficient.
    """

    penalizes = True

    def __init__(self, options: ArCHer, start: InitialPolicy, controller: KLController) -> None:
        self.options, self.policy = options, start.policy
        self.warmup = min(options.value_warmup, options.iterations // 3)
        given = {name: getattr(options, name) for name in ("clip_epsilon", "entropy_weight", "normalize_advantage")}
        if options.kl_coef:
            given |= {"kl_weight": controller, "kl_estimator": "exact", "reference": start.reference}
        # The mean over utterances of the sum over their tokens, as in the paper.
        self.loss = PPOLoss(start.policy, aggregation=1, **given)
        width, normalize, device = hidden_size(start.lm.config), options.normalize_states, start.lm.device
        trunk: Any = split_actor(start.policy.decoder.actor).trunk
        frozen = {id(weight): weight for weight in trunk.parameters() if not weight.requires_grad}
        self.critic = ArCHerLoss(
            start.policy,
            qvalue_module(UtteranceQValueHead(width, normalize=normalize).to(device)),
            value_module(ValueHead(width, normalize=normalize).to(device)),
            value_trunk=deepcopy(trunk, frozen),  # which shares the weights that do not train
            target_trunk=True,
            **loss_options(options, ArCHerLoss),
        ).eval()
        own = {name: part for name, part in self.critic.named_children() if name != "actor_network"}
        self.state, self.heads = nn.ModuleDict(own), nn.ModuleList(own[f"{name}_params"] for name in _HEADS)
        self.optimizer = adamw(self.state, options.value_lr)
        self.scheduler = warmup_cosine(self.optimizer, options.iterations, final=options.final_lr)
        self.updater = SoftUpdate(self.critic, tau=options.tau)
        self.pool = LatestRows(options.replay)
        self._figures: dict[str, Tensor] = {}

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """Train the critic on the games kept; the utterances that the policy draws then, with their advantages."""
        iteration = self.scheduler.last_epoch + 1
        games = rows.select(*_KEPT, strict=False).set("token_reward", rows.get(RAW_REWARD))
        replayed = self.pool.extend(games).rows
        self._figures = self._train_critic(replayed, iteration)
        self.scheduler.step()
        if not self.trains_policy(iteration):
            return rows[:0]
        return gather_rows(self.critic.estimate(self._draw(games if self.options.states == "new" else replayed)))

    def trains_policy(self, iteration: int) -> bool:
        """Whether the warmup of the critic is over."""
        return iteration > self.warmup

    def metrics(self) -> Mapping[str, Tensor]:
        """The critic's: means over its steps in an iteration."""
        return self._figures

    def parts(self) -> Mapping[str, Stateful]:
        """The critic, what trains it, and the games kept."""
        own: dict[str, Stateful] = {"critic": TrainableState(self.state), "critic_optimizer": self.optimizer}
        return own | {"critic_scheduler": self.scheduler, "pool": self.pool}

    def _draw(self, rows: TensorDictBase) -> TensorDictBase:
        """Draw the share of the utterances that belongs to this process."""
        return draw_utterances(self.policy, rows, -(-self.options.draws // _ranks.size()))

    def _train_critic(self, rows: TensorDictBase, iteration: int) -> dict[str, Tensor]:
        options, size = self.options, self.options.batch_size
        shared: Any = {"seed": options.seed + iteration, "share": (_ranks.rank(), _ranks.size())}
        played = row_buffer(rows, size, **shared)
        drawn = row_buffer(gather_rows(self._draw(rows)), size, **shared)
        steps = train_steps(
            self.critic,
            lambda: with_drawn(played.sample(), drawn.sample()).to(options.torch_device()),
            self.optimizer,
            steps=options.value_steps,
            target_updater=self.updater,
            max_grad_norm=options.max_grad_norm,
            clip_apart=[self.heads] if options.clip_heads else (),
            autocast=torch.bfloat16 if options.bf16 else None,
        )
        means = mean_figures([figures for _, figures in steps])
        return {"critic_loss": means["loss"], **{name: means[name] for name in _SHOWN}}


def train_archer(options: ArCHer) -> float:
    """Train; returns the best mean return."""
    return train_online(options, ArCHerLearner)
