"""PPO from a finished run, with a KL penalty to it."""

from __future__ import annotations

from tensordict import TensorDictBase

from torchrl_lang.modules import value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.recipes.algorithms import PPO
from torchrl_lang.recipes.initial_policy import InitialPolicy, load_initial_policy
from torchrl_lang.recipes.online import Learner, kl_transform, train_online

__all__ = ["PPO", "PPOLearner", "main"]


class PPOLearner(Learner):
    """Learns from all games, with the log-probabilities and values that the policy wrote while acting."""

    def __init__(self, options: PPO, start: InitialPolicy) -> None:
        self.value_warmup, self.detach_value = options.value_warmup, options.detach_value
        self.rates = ((start.value, options.value_lr),)
        self.loss = PPOLoss(
            start.policy,
            value_module(start.value),
            clip_epsilon=options.clip_epsilon,
            value_weight=options.value_weight,
            entropy_weight=options.entropy_weight,
            gamma=options.gamma,
            lmbda=options.lmbda,
            turn_gamma=options.turn_gamma,
            turn_lmbda=options.turn_lmbda,
            detach_value=options.detach_value,
        )

    def choose(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows with their advantages."""
        return self.loss.estimate(rows, reuse_values=True)

    def losses(self, batch: TensorDictBase, iteration: int) -> TensorDictBase:
        """All losses; only the value loss during the value warmup."""
        trains_policy = self.trains_policy(iteration)
        self.loss.detach_value = self.detach_value or not trains_policy
        losses = self.loss(batch)
        return losses if trains_policy else losses.select("loss_critic", "explained_variance")

    def trains_policy(self, iteration: int) -> bool:
        """Whether the value warmup is over."""
        return iteration > self.value_warmup


def main(options: PPO) -> float:
    """Train; returns the best mean return."""
    start = load_initial_policy(options)
    return train_online(options, start, kl_transform(options, start), PPOLearner(options, start))
