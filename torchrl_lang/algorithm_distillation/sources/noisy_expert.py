"""Noise distillation: an expert whose noise decays looks like a learner."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.sources.exploration import SLOW_DECAY, LinearDecay
from torchrl_lang.algorithm_distillation.sources.tabular import TabularSource
from torchrl_lang.envs.grids import HiddenTaskEnv

__all__ = ["NoisyExpert"]


class NoisyExpert(TabularSource):
    """An optimal policy with uniform noise that decays over the history (arXiv 2312.12275).

    Nothing is trained: the expert has the task and follows a shortest path, or pulls the best arm. Actions that are
    equally good are equally likely. ``LinearDecay(0, 0)`` records the expert alone, the data of expert distillation.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`.
        decay: how the noise decays.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import LinearDecay, NoisyExpert
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(5, task=torch.arange(25)[:, None], batch_size=[25, 2])
        >>> expert = NoisyExpert(env, 20, decay=LinearDecay(0, 0)).history()
        >>> bool((expert["reward"].sum((-2, -1)) == env.optimal_return()).all())
        True
    """

    def __init__(self, env: HiddenTaskEnv, steps: int, *, decay: LinearDecay = SLOW_DECAY, seed: int = 0) -> None:
        super().__init__(env, steps, seed=seed)
        self.decay = decay

    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""
        return {"decay": asdict(self.decay)}

    def _begin(self, random: RandomStream) -> None:
        self._fraction = self.decay.draw(self._n, random)

    def _best(self) -> Tensor:
        return self.env.optimal_actions().flatten(0, 1)

    def _epsilon(self, progress: float) -> Tensor:
        return self.decay.at(progress, self._fraction)

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        """The expert has nothing to learn."""
