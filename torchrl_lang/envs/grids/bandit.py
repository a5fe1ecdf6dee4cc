"""Bernoulli bandits: arms that pay 1 with hidden probabilities."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from torchrl_lang.envs.grids.base import HiddenTaskEnv, TaskOptions
from torchrl_lang.functional.random import random_index

_RESOLUTION = 1 << 24
"""Number of outcomes that a draw distinguishes; float32 represents them exactly."""


def random_bandits(tasks: int, arms: int, *, seed: int = 0) -> Tensor:
    """Draw each arm's probability uniformly from [0, 1), float32 ``[tasks, arms]``, as RL^2 does (arXiv 1611.02779).

    Training and evaluation tasks then have the same distribution. The bandits of algorithm distillation (arXiv
    2210.14215) have another one in each: mostly odd arms pay in training tasks, mostly even arms in evaluation tasks.
    Pass such tasks to :class:`BernoulliBanditEnv` as ``probabilities``.

    Examples:
        >>> from torchrl_lang.envs.grids import random_bandits
        >>> random_bandits(100, 10, seed=0).shape
        torch.Size([100, 10])
    """
    return torch.rand(tasks, arms, generator=torch.Generator().manual_seed(seed))


class BernoulliBanditEnv(HiddenTaskEnv):
    """Pull one of several arms; it pays 1 with its hidden probability, else 0.

    A task is a row of ``probabilities``. There is one state, and the observation is always 0, int64 ``[*B, 1]``.
    Episodes are never terminated. Whether step ``t`` of an episode pays is decided by one uniform number that the seed,
    the episode and ``t`` determine, the same for all arms.

    Args:
        probabilities: float ``[tasks, arms]``, such as those of :func:`random_bandits`.
        episode_length: number of pulls after which an episode is truncated.
        **options: ``task``, ``batch_size``, ``seed`` and ``device``, as in
            :class:`~torchrl_lang.envs.grids.HiddenTaskEnv`.

    Raises:
        ValueError: ``probabilities`` are not two-dimensional with at least one task and arm, or not in [0, 1].

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.grids import BernoulliBanditEnv
        >>> env = BernoulliBanditEnv(torch.tensor([[0.2, 0.9], [0.5, 0.1]]), task=torch.tensor([0, 1]), batch_size=[2])
        >>> env.optimal_return()
        tensor([90., 50.])
    """

    def __init__(self, probabilities: Tensor, *, episode_length: int = 100, **options: Unpack[TaskOptions]) -> None:
        if probabilities.ndim != 2 or not ((probabilities >= 0) & (probabilities <= 1)).all():
            raise ValueError(f"probabilities must be [tasks, arms] and lie in [0, 1], got {probabilities}.")
        tasks, arms = probabilities.shape
        sizes: dict[str, Any] = {"n_tasks": tasks, "n_states": 1, "n_actions": arms, "observation_shape": (1, 1)}
        super().__init__(episode_length=episode_length, **sizes, **options)
        self._probabilities: Tensor
        table = probabilities.to(self.device, torch.float32, copy=True)
        self.register_buffer("_probabilities", table, persistent=False)

    def _start(self, episode: Tensor, task: Tensor) -> Tensor:
        return torch.zeros_like(episode)

    def _transition(self, state: Tensor, action: Tensor, task: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # A counter of its own for each episode and step: starts use the even numbers of the same key, tasks the odd.
        draw = random_index(random_index(self._key, -1 - self._number, 1 << 31), self._steps, _RESOLUTION)
        pays = draw < self._probabilities[task, action] * _RESOLUTION
        return state, pays.to(torch.float32), torch.zeros_like(pays)

    def _observation(self, state: Tensor) -> Tensor:
        return state[:, None].clone()

    def _optimal_actions(self, state: Tensor, task: Tensor) -> Tensor:
        probabilities = self._probabilities[task]
        return probabilities == probabilities.amax(-1, keepdim=True)

    def optimal_return(self, task: Tensor | None = None) -> Tensor:
        """``episode_length`` times the best arm's probability."""
        return self.episode_length * self._probabilities[self._tasks(task)].amax(-1)

    def describe_task(self, task: int) -> dict[str, Any]:
        """The probabilities of the arms."""
        return {"task": task, "probabilities": self._probabilities[self._task_numbers(task)].tolist()}
