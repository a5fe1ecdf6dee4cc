"""Posterior sampling: a learner that searches, and exploits as soon as it has found the task."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.sources.exploration import NO_NOISE, LinearDecay
from torchrl_lang.algorithm_distillation.sources.tabular import TabularSource
from torchrl_lang.envs.grids import HiddenTaskEnv, RoomEnv

__all__ = ["PosteriorSampling"]


class PosteriorSampling(TabularSource):
    """Thompson sampling over the tasks of a family of rooms (posterior sampling, arXiv 1306.0940).

    The learner has the rules of the family, but not its task. It draws a task from those that agree with all rewards
    so far, each equally likely, and acts optimally for it until a reward contradicts it. So it does not search a place
    twice, and its histories show how to search, which those of an expert with noise do not.

    Each step compares every task of the family with every stream: a family should have a few hundred tasks at most.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`.
        decay: noise that is added, and how it decays over the history.

    Raises:
        ValueError: the environment is not a room: rewards that are random do not rule a task out.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import episode_returns
        >>> from torchrl_lang.algorithm_distillation.sources import PosteriorSampling
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 8])
        >>> returns = episode_returns(PosteriorSampling(env, 200).history(), 10)
        >>> bool((returns[..., -1] == env.optimal_return()).float().mean() > 0.95)
        True
    """

    def __init__(self, env: HiddenTaskEnv, steps: int, *, decay: LinearDecay = NO_NOISE, seed: int = 0) -> None:
        if not isinstance(env, RoomEnv):
            raise ValueError(f"PosteriorSampling needs a room, whose rewards are not random, got {type(env).__name__}.")
        super().__init__(env, steps, seed=seed)
        self.decay = decay

    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""
        return {"decay": asdict(self.decay)}

    def _begin(self, random: RandomStream) -> None:
        self._random, self._fraction = random, self.decay.draw(self._n, random)
        self._possible = torch.ones(self._n, self.env.n_tasks, dtype=torch.bool, device=self._device)
        self._drawn = self._draw()

    def _draw(self) -> Tensor:
        """A task for each stream among those that are possible."""
        return self._random.choice(self._possible)

    def _best(self) -> Tensor:
        return self.env._optimal_actions(self.env.state.reshape(-1), self._drawn)

    def _epsilon(self, progress: float) -> Tensor:
        return self.decay.at(progress, self._fraction)

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        streams, tasks = self._possible.shape
        every = torch.arange(tasks, device=self._device).repeat(streams)
        states, actions = state.repeat_interleave(tasks), action.repeat_interleave(tasks)
        _, predicted, _ = self.env._transition(states, actions, every)
        self._possible &= predicted.view(streams, tasks) == reward[:, None]
        contradicted = ~self._possible.gather(-1, self._drawn[:, None]).squeeze(-1)
        self._drawn = torch.where(contradicted, self._draw(), self._drawn)
