"""PPO of TorchRL on Gymnasium tasks with discrete or continuous actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.data import Bounded
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_lang._checks import at_least_one, finite, positive, within
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.sources.gym_networks import observation_network
from torchrl_lang.algorithm_distillation.sources.gym_source import GymSource
from torchrl_lang.algorithm_distillation.sources.gym_tasks import GymTask
from torchrl_lang.schema import ACTION_LOG_PROB, OBSERVATION

__all__ = ["PPO"]


class PPO(GymSource):
    """Proximal policy optimization (arXiv 1707.06347) with advantages by GAE (arXiv 1506.02438).

    Discrete actions are categorical. Continuous ones are normal, squashed into the bounds of their space; if one of the
    bounds is infinite, none is squashed, and the environment gets them clipped. Recorded are the actions before they
    are clipped, with their log-probabilities under the policy that acted.

    Args:
        tasks, steps, streams, frames, width, learning_rate, gamma, seed: as in
            :class:`~torchrl_lang.algorithm_distillation.sources.GymSource`.
        epochs: passes over each ``frames`` steps.
        batch_size: steps per training step.
        lmbda: the lambda of GAE.
        clip_epsilon: clipping range of the probability ratio.
        entropy_weight: weight of the policy's entropy.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.sources import PPO, GymTask
        >>> history = PPO([GymTask("Pendulum-v1", {"g": g}) for g in (5.0, 10.0)], 64, frames=32).history()
        >>> history["action"].shape, bool((history["action"].abs() <= 2).all())
        (torch.Size([2, 1, 64, 1]), True)
    """

    def __init__(
        self,
        tasks: Sequence[GymTask],
        steps: int,
        *,
        streams: int = 1,
        frames: int = 512,
        epochs: int = 8,
        batch_size: int = 64,
        width: int = 64,
        learning_rate: float = 1e-3,
        gamma: float = 0.99,
        lmbda: float = 0.95,
        clip_epsilon: float = 0.2,
        entropy_weight: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            tasks,
            steps,
            streams=streams,
            frames=frames,
            width=width,
            learning_rate=learning_rate,
            gamma=gamma,
            seed=seed,
        )
        at_least_one("epochs", epochs)
        at_least_one("batch_size", batch_size)
        within("lmbda", lmbda, 0, 1)
        positive("clip_epsilon", clip_epsilon)
        finite("entropy_weight", entropy_weight)
        self.epochs, self.batch_size, self.lmbda = epochs, batch_size, lmbda
        self.clip_epsilon, self.entropy_weight = clip_epsilon, entropy_weight

    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""
        own = ("epochs", "batch_size", "lmbda", "clip_epsilon", "entropy_weight")
        return {**super().options(), **{key: getattr(self, key) for key in own}}

    def _learner(self, env: EnvBase, random: RandomStream) -> _PPOLearner:
        return _PPOLearner(self, env)


class _PPOLearner:
    """The networks of one stream."""

    def __init__(self, options: PPO, env: EnvBase) -> None:
        self.options = options
        self.policy = _actor(env, options.width)
        critic = ValueOperator(_network(env, 1, options.width), in_keys=[OBSERVATION])
        self.advantage = GAE(gamma=options.gamma, lmbda=options.lmbda, value_network=critic)
        self.loss = ClipPPOLoss(
            self.policy,
            critic,
            clip_epsilon=options.clip_epsilon,
            entropy_bonus=options.entropy_weight > 0,
            entropy_coeff=options.entropy_weight,
            normalize_advantage=True,
        )
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=options.learning_rate)

    def before(self, progress: float) -> None:
        """The policy needs no preparation."""

    def learn(self, batch: TensorDictBase) -> Tensor:
        self.advantage(batch)
        for _ in range(self.options.epochs):
            for rows in torch.randperm(len(batch)).split(self.options.batch_size):
                losses = self.loss(batch[rows])
                self.optimizer.zero_grad()
                sum(losses[key] for key in losses.keys() if key.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
                self.optimizer.step()
        return batch.get(ACTION_LOG_PROB)


def _network(env: EnvBase, outputs: int, width: int) -> nn.Module:
    return observation_network(env, outputs, width, nn.Tanh)


def _actor(env: EnvBase, width: int) -> ProbabilisticActor:
    """A policy for the environment's actions: discrete, in a box, or all real numbers."""
    spec, options = env.action_spec, dict[str, Any]()
    if spec.ndim == 0:
        network, keys, distribution = _network(env, spec.n, width), ["logits"], Categorical
    else:
        network = nn.Sequential(_network(env, 2 * spec.shape[-1], width), NormalParamExtractor())
        keys, distribution = ["loc", "scale"], IndependentNormal
        if isinstance(spec, Bounded):
            distribution = TanhNormal
            options = {"distribution_kwargs": {"low": spec.space.low, "high": spec.space.high}}
    module = TensorDictModule(network, in_keys=[OBSERVATION], out_keys=keys)
    return ProbabilisticActor(
        module, in_keys=keys, spec=spec, distribution_class=distribution, return_log_prob=True, **options
    )
