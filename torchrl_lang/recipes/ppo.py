"""PPO: learn from the games that the policy itself plays, near to where it started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tensordict import TensorDictBase

from torchrl_lang.modules import value_module
from torchrl_lang.objectives import PPOLoss
from torchrl_lang.recipes.online import begin, keep_near, train_online
from torchrl_lang.recipes.online_options import OnlineOptions
from torchrl_lang.recipes.options import option
from torchrl_lang.recipes.start import Start
from torchrl_lang.training import Stateful

__all__ = ["PPO", "PPOLearner", "TextWorldPPO", "main"]


@dataclass(frozen=True)
class PPO(OnlineOptions):
    """Proximal policy optimisation (arXiv 1707.06347) from a finished run, near to it."""

    clip_epsilon: float = option(0.2, "how far a token's probability may move, as a ratio, before it gains nothing")
    value_lr: float = option(3e-3, "peak learning rate of the values: they must follow a policy that moves slowly")
    value_weight: float = option(0.5, "weight of the values' loss")
    entropy_weight: float = option(0.0, "weight of the policy's entropy")
    gamma: float = option(1.0, "discount from token to token of an utterance")
    lmbda: float = option(0.95, "trust in what follows inside an utterance")
    turn_gamma: float = option(0.99, "discount from turn to turn")
    turn_lmbda: float = option(0.95, "trust in what follows across turns")
    detach_value: bool = option(True, "values read the states of the model and do not pull at them")
    value_warmup: int = option(10, "iterations in which values alone learn: wrong ones would push the policy about")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.value_warmup < self.iterations:
            raise ValueError(
                f"value_warmup={self.value_warmup} of {self.iterations} iterations leave none for the policy to learn."
            )


@dataclass(frozen=True)
class TextWorldPPO(PPO):
    """Proximal policy optimisation in TextWorld games, from a run that imitates experts, near to it."""

    # Who imitates experts errs seldom, so that most of what a batch says is noise: small steps, over many games.
    iterations: int = option(40, "times of playing and learning")
    games: int = option(192, "games played side by side")
    turns: int = option(12, "turns of each of them between two updates")
    epochs: int = option(4, "times that each game is learned from")
    lr: float = option(5e-5, "peak learning rate of AdamW; Muon's is ten times that")
    kl_coef: float = option(0.1, "what a nat of divergence from the start costs, at first")
    kl_target: float | None = option(1.5, "divergence sought, in nats a game; none keeps the coefficient as it is")
    kl_horizon: int = option(2000, "games over which the coefficient may change by a fifth")
    turn_gamma: float = option(0.95, "discount from turn to turn")
    eval_every: int = option(20, "iterations between evaluations, each with a checkpoint")
    eval_games: int = option(96, "games an evaluation")


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
