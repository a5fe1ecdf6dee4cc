"""PPO: learn from the games that the policy itself plays, near to where it started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensordict import TensorDictBase

from torchrl_lang.modules import value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.recipes.online import begin, keep_near, train_online
from torchrl_lang.recipes.online_options import OnlineOptions
from torchrl_lang.recipes.options import option, with_defaults
from torchrl_lang.recipes.start import Start
from torchrl_lang.training import Stateful

__all__ = ["PPO", "PPOLearner", "TextWorldPPO", "main"]


@dataclass(frozen=True)
class PPO(OnlineOptions):
    """Proximal policy optimisation (arXiv 1707.06347) from a finished run, near to it."""

    clip_epsilon: float = option(
        0.2, "how far a token's probability may move, as a ratio, before it gains nothing", above=0
    )
    value_lr: float = option(
        3e-3, "peak learning rate of the values: they must follow a policy that moves slowly", above=0, at_most=1
    )
    value_weight: float = option(0.5, "weight of the values' loss", at_least=0)
    entropy_weight: float = option(0.0, "weight of the policy's entropy", at_least=0)
    gamma: float = option(1.0, "discount from token to token of an utterance", at_least=0, at_most=1)
    lmbda: float = option(0.95, "trust in what follows inside an utterance", at_least=0, at_most=1)
    turn_gamma: float = option(0.99, "discount from turn to turn", at_least=0, at_most=1)
    turn_lmbda: float = option(0.95, "trust in what follows across turns", at_least=0, at_most=1)
    detach_value: bool = option(True, "values read the states of the model and do not pull at them")
    value_warmup: int = option(
        10, "iterations in which values alone learn: wrong ones would push the policy about", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.value_warmup >= self.iterations:
            raise ValueError(
                f"value_warmup={self.value_warmup} of {self.iterations} iterations leave none for the policy to learn."
            )


# Who imitates experts errs seldom, so that most of what a batch says is noise: small steps, over many games.
@with_defaults(
    iterations=40,
    games=192,
    turns=12,
    epochs=4,
    lr=5e-5,
    kl_coef=0.1,
    kl_target=1.5,
    kl_horizon=2000,
    turn_gamma=0.95,
    eval_every=20,
    eval_games=96,
)
class TextWorldPPO(PPO):
    """Proximal policy optimisation in TextWorld games, from a run that imitates experts, near to it."""


class PPOLearner:
    """All games are learned from; log-probabilities and values are those that acting wrote."""

    def __init__(self, options: PPO, start: Start) -> None:
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
        """All of them, or at first the values' alone."""
        moves = self.moves_policy(iteration)
        self.loss.detach_value = self.detach_value or not moves
        losses = self.loss(batch)
        return losses if moves else losses.select("loss_critic", "explained_variance")

    def moves_policy(self, iteration: int) -> bool:
        """Whether the values have been warmed up."""
        return iteration > self.value_warmup

    def parts(self) -> Mapping[str, Stateful]:
        """Nothing beside the loss."""
        return {}


def main(options: PPO) -> float:
    """Train; returns the best mean return."""
    start = begin(options)
    return train_online(options, start, keep_near(options, start), PPOLearner(options, start))
