"""PPO from a finished run, with a KL penalty to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tensordict import TensorDictBase

from torchrl_lang.modules import value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.recipes.initial_policy import InitialPolicy, load_initial_policy
from torchrl_lang.recipes.online import Learner, kl_transform, train_online
from torchrl_lang.recipes.online_options import OnlineOptions
from torchrl_lang.recipes.options import option

__all__ = ["PPO", "PPOLearner", "main"]


@dataclass(frozen=True, kw_only=True)
class PPO(OnlineOptions):
    """Proximal policy optimization (arXiv 1707.06347) from a finished run, with a KL penalty to it."""

    preset: ClassVar[str] = "ppo"

    clip_epsilon: float = option(0.2, "clipping range of the probability ratio", above=0)
    value_lr: float = option(3e-3, "peak learning rate of the value head", above=0, at_most=1)
    value_weight: float = option(0.5, "weight of the value loss", at_least=0)
    entropy_weight: float = option(0.0, "weight of the policy's entropy", at_least=0)
    gamma: float = option(1.0, "discount factor between tokens of an utterance", at_least=0, at_most=1)
    lmbda: float = option(0.95, "lambda of the advantage estimate inside an utterance", at_least=0, at_most=1)
    turn_gamma: float = option(0.99, "discount factor between turns", at_least=0, at_most=1)
    turn_lmbda: float = option(0.95, "lambda of the advantage estimate across turns", at_least=0, at_most=1)
    detach_value: bool = option(True, "stop value gradients at the trunk")
    value_warmup: int = option(10, "iterations at the beginning in which only the value head is trained", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_warmup >= self.iterations:
            raise ValueError(
                f"value_warmup={self.value_warmup} of {self.iterations} iterations leave none for the policy to learn."
            )


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
