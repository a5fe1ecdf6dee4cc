"""The base class of sources that train a network of TorchRL on Gymnasium tasks, one learner per stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.data import Composite
from torchrl.envs import EnvBase

from torchrl_lang._checks import at_least_one, positive, within
from torchrl_lang._random_stream import RandomStream, seeded_generators
from torchrl_lang.algorithm_distillation.sources.base import HistorySource
from torchrl_lang.algorithm_distillation.sources.gym_tasks import GymTask
from torchrl_lang.schema import (
    ACTION,
    ACTION_LOG_PROB,
    DONE,
    EPISODE,
    EPISODE_STEP,
    OBSERVATION,
    REWARD,
    TERMINATED,
)

__all__ = ["GymLearner", "GymSource", "step_numbers"]


class GymLearner(Protocol):
    """One learner: what it acts with, and how it learns.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.sources import PPO, cart_pole
        >>> from torchrl_lang._random_stream import RandomStream
        >>> task = cart_pole()
        >>> PPO([task], 100)._learner(task.make(), RandomStream(0)).policy.out_keys
        ['logits', 'action', 'action_log_prob']
    """

    policy: TensorDictModuleBase

    def before(self, progress: float) -> None:
        """Prepare the policy for its next steps, after the share ``progress`` of its history."""

    def learn(self, batch: TensorDictBase) -> Tensor:
        """Learn from a collector's steps ``[F]``; returns the log-probabilities of their actions, ``[F]``."""


class GymSource(HistorySource):
    """Trains one learner per stream on Gymnasium tasks. Abstract: an algorithm builds its learner.

    Streams are learned one after the other, in full before the first block, with TorchRL's ``Collector``, networks and
    losses; torch's global random streams are left as they were. Histories are repeated exactly by the same versions,
    processor and number of threads only.

    Args:
        tasks: the variants, with the same spaces.
        steps: steps of each stream.
        streams: number of streams of each task, which differ in their seeds.
        frames: steps that a learner collects before it learns from them.
        width: units in each of the two hidden layers of the networks.
        learning_rate: of Adam.
        gamma: the discount.
        seed: seed of the environments, the networks and the actions.

    Attributes:
        is_discrete: whether the actions are discrete.

    Raises:
        ValueError: the tasks have different spaces, or some that
            :class:`~torchrl_lang.algorithm_distillation.sources.GymTask` does not convert.

    Examples:
        >>> from torchrl_lang.algorithm_distillation.sources import DQN, GymSource, cart_pole
        >>> source = DQN([cart_pole(length=0.5), cart_pole(length=1.0)], 1000, streams=3)
        >>> isinstance(source, GymSource), source.is_discrete, source.tasks[1]["attributes"]["length"]
        (True, True, 1.0)
    """

    def __init__(
        self,
        tasks: Sequence[GymTask],
        steps: int,
        *,
        streams: int,
        frames: int,
        width: int,
        learning_rate: float,
        gamma: float,
        seed: int,
    ) -> None:
        super().__init__([task.describe(number) for number, task in enumerate(tasks)], streams, steps, seed=seed)
        at_least_one("frames", frames)
        at_least_one("width", width)
        positive("learning_rate", learning_rate)
        within("gamma", gamma, 0, 1)
        self.gym_tasks, self.frames, self.width = list(tasks), frames, width
        self.learning_rate, self.gamma = learning_rate, gamma
        self._check_spaces()

    @abstractmethod
    def _learner(self, env: EnvBase, random: RandomStream) -> GymLearner:
        """A new learner for ``env``; ``random`` is for what it draws beside torch's global stream."""

    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""
        return {key: getattr(self, key) for key in ("frames", "width", "learning_rate", "gamma")}

    def blocks(self, length: int = 200) -> Iterator[TensorDict]:
        """Run all streams and yield their steps, ``[tasks, streams, length]``; the last block may be shorter."""
        at_least_one("length", length)
        shape = (len(self.tasks), self.streams)
        seeds = RandomStream(self.seed).below(torch.full(shape, 2**31)).tolist()
        rows = [[self._stream(task, one) for one in row] for task, row in zip(self.gym_tasks, seeds, strict=True)]
        history = torch.stack([torch.stack(row) for row in rows])
        yield from history.split(length, -1)

    def _stream(self, task: GymTask, seed: int) -> TensorDict:
        """The life of one learner, ``[steps]``."""
        random = RandomStream(seed)
        with seeded_generators(seed), closing(task.make()) as env:
            env.set_seed(seed)
            learner, rows = self._learner(env, random), list[TensorDict]()
            learner.before(0)
            options = {"frames_per_batch": self.frames, "total_frames": -1, "auto_register_policy_transforms": False}
            collector = Collector(env, learner.policy, **options)
            for number, batch in enumerate(collector, start=1):
                rows.append(_row(batch, learner.learn(batch)))
                if number * self.frames >= self.steps:
                    break
                learner.before(number * self.frames / self.steps)
            collector.shutdown(close_env=False)
        steps: Any = torch.cat(rows)[: self.steps]  # typed as a tensor by torch
        episode, step = step_numbers(steps.get(DONE).squeeze(-1))
        return steps.set(EPISODE, episode).set(EPISODE_STEP, step)

    def _check_spaces(self) -> None:
        if not self.gym_tasks:
            raise ValueError("A source needs at least one task, got none.")
        found = list[Composite]()
        for task in self.gym_tasks:
            with closing(task.make()) as env:
                found.append(Composite({OBSERVATION: env.observation_spec, ACTION: env.action_spec}))
        if any(spaces != found[0] for spaces in found):
            raise ValueError(f"The tasks of a source have the same spaces, got {found}: give a source for each.")
        self.is_discrete = found[0][ACTION].ndim == 0


def _row(batch: TensorDictBase, log_prob: Tensor) -> TensorDict:
    """The columns of a collector's steps ``[F]``, without the numbers of episodes."""
    after = {key: batch.get(("next", key)) for key in (REWARD, DONE, TERMINATED)}
    before = {key: batch.get(key) for key in (OBSERVATION, ACTION)}
    return TensorDict({**before, **after, ACTION_LOG_PROB: log_prob}, batch.batch_size).clone()


def step_numbers(done: Tensor) -> tuple[Tensor, Tensor]:
    """The ``episode`` and ``episode_step`` of steps whose ``done`` flags are bool ``[*B, L]``, each int64 ``[*B, L]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources.gym_source import step_numbers
        >>> step_numbers(torch.tensor([False, True, True, False]))
        (tensor([0, 0, 1, 2]), tensor([0, 1, 0, 0]))
    """
    begins = torch.cat([torch.ones_like(done[..., :1]), done[..., :-1]], -1)
    number = torch.arange(done.shape[-1]).expand(done.shape)
    return begins.cumsum(-1) - 1, number - torch.where(begins, number, 0).cummax(-1).values
