"""DQN of TorchRL on Gymnasium tasks with discrete actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate, ValueEstimators

from torchrl_lang._checks import at_least_one, positive
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.sources.exploration import LinearDecay
from torchrl_lang.algorithm_distillation.sources.gym_networks import observation_network
from torchrl_lang.algorithm_distillation.sources.gym_source import GymSource
from torchrl_lang.algorithm_distillation.sources.gym_tasks import GymTask
from torchrl_lang.schema import ACTION, OBSERVATION

__all__ = ["DQN"]

_DECAY = LinearDecay(1.0, 0.05, fraction=(0.3, 0.3))


class DQN(GymSource):
    r"""Deep Q-learning (arXiv 1312.5602) with double Q-learning (arXiv 1509.06461) and epsilon-greedy actions.

    After each ``frames`` steps the network is trained on random steps of the whole life so far, with TorchRL's
    ``DQNLoss``; the target network follows by Polyak averaging. The recorded log-probability is that of

    .. math:: \pi(a) = \epsilon / A + (1 - \epsilon)\, [a = \arg\max_{a'} Q(s, a')]

    Args:
        tasks, steps, streams, frames, width, learning_rate, gamma, seed: as in
            :class:`~torchrl_lang.algorithm_distillation.sources.GymSource`.
        updates: training steps after each ``frames`` steps.
        batch_size: steps per training step.
        target_rate: share of the network in each update of the target network.
        decay: how epsilon decays over the history.

    Raises:
        ValueError: the actions are not discrete.

    Examples:
        >>> from torchrl_lang.algorithm_distillation import LearningHistory
        >>> from torchrl_lang.algorithm_distillation.sources import DQN, cart_pole
        >>> source = DQN([cart_pole(), cart_pole(force=-10.0)], 64, streams=2)
        >>> LearningHistory(source.history(), source.tasks, source=source.describe())
        LearningHistory(2 tasks, 2 streams, 64 steps)
    """

    def __init__(
        self,
        tasks: Sequence[GymTask],
        steps: int,
        *,
        streams: int = 1,
        frames: int = 32,
        updates: int = 16,
        batch_size: int = 64,
        width: int = 64,
        learning_rate: float = 1e-3,
        gamma: float = 0.99,
        target_rate: float = 0.02,
        decay: LinearDecay = _DECAY,
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
        at_least_one("updates", updates)
        at_least_one("batch_size", batch_size)
        positive("target_rate", target_rate)
        if not self.is_discrete:
            raise ValueError(f"DQN needs discrete actions, which {tasks[0].name} does not have: use PPO.")
        self.updates, self.batch_size, self.target_rate, self.decay = updates, batch_size, target_rate, decay

    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""
        own = {key: getattr(self, key) for key in ("updates", "batch_size", "target_rate")}
        return {**super().options(), **own, "decay": asdict(self.decay)}

    def _learner(self, env: EnvBase, random: RandomStream) -> _QLearner:
        return _QLearner(self, env, random)


class _QLearner:
    """The network of one stream, its target network and its replay buffer."""

    def __init__(self, options: DQN, env: EnvBase, random: RandomStream) -> None:
        self.options, spec = options, env.action_spec
        network = observation_network(env, spec.n, options.width, torch.nn.ReLU)
        actor = QValueActor(network, in_keys=[OBSERVATION], spec=spec)
        self.explore = EGreedyModule(spec)
        self.policy = TensorDictSequential(actor, self.explore)
        self.loss = DQNLoss(actor, double_dqn=True, loss_function="smooth_l1")
        self.loss.make_value_estimator(ValueEstimators.TD0, gamma=options.gamma)
        self.target = SoftUpdate(self.loss, tau=options.target_rate)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=options.learning_rate)
        storage = LazyTensorStorage(-(-options.steps // options.frames) * options.frames)
        self.buffer = TensorDictReplayBuffer(storage=storage, batch_size=options.batch_size)
        self.fraction = options.decay.draw(1, random)[0]

    def before(self, progress: float) -> None:
        self.explore.eps.copy_(self.options.decay.at(progress, self.fraction))

    def learn(self, batch: TensorDictBase) -> Tensor:
        greedy = batch.get("action_value").argmax(-1) == batch.get(ACTION)
        epsilon, actions = self.explore.eps, batch.get("action_value").shape[-1]
        log_prob = (epsilon / actions + (1 - epsilon) * greedy).log()
        self.buffer.extend(batch.select(OBSERVATION, ACTION, "next"))
        for _ in range(self.options.updates):
            self.optimizer.zero_grad()
            self.loss(self.buffer.sample())["loss"].backward()
            self.optimizer.step()
            self.target.step()
        return log_prob
