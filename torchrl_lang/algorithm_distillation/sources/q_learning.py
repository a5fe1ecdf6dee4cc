"""Tabular Q-learning on many tasks at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from torchrl_lang._checks import within
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.sources.exploration import SLOW_DECAY, LinearDecay
from torchrl_lang.algorithm_distillation.sources.tabular import TabularSource
from torchrl_lang.envs.grids import HiddenTaskEnv

__all__ = ["QLearning"]


class QLearning(TabularSource):
    r"""Tabular Q-learning (Watkins and Dayan 1992) with epsilon-greedy actions, one table per stream.

    .. math:: Q(s, a) \leftarrow Q(s, a) + \alpha\, (r + \gamma\, (1 - terminated) \max_{a'} Q(s', a') - Q(s, a))

    Tables begin at 0; ties are broken uniformly. A truncated episode bootstraps from its last state. States are those
    of :attr:`~torchrl_lang.envs.grids.HiddenTaskEnv.state`, which may hold more than the observation.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`.
        learning_rate: the ``alpha`` of the formula.
        gamma: the discount.
        decay: how epsilon decays over the history.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import QLearning
        >>> from torchrl_lang.envs.grids import DarkRoomEnv
        >>> env = DarkRoomEnv(3, task=torch.arange(9)[:, None], batch_size=[9, 4])
        >>> reward = QLearning(env, 2000).history()["reward"].mean((0, 1))
        >>> bool(reward[:100].mean() < 0.3 < 0.8 < reward[-100:].mean())
        True
    """

    def __init__(
        self,
        env: HiddenTaskEnv,
        steps: int,
        *,
        learning_rate: float = 0.5,
        gamma: float = 0.9,
        decay: LinearDecay = SLOW_DECAY,
        seed: int = 0,
    ) -> None:
        super().__init__(env, steps, seed=seed)
        within("learning_rate", learning_rate, 0, 1)
        within("gamma", gamma, 0, 1)
        self.learning_rate, self.gamma, self.decay = learning_rate, gamma, decay

    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""
        return {"learning_rate": self.learning_rate, "gamma": self.gamma, "decay": asdict(self.decay)}

    def _begin(self, random: RandomStream) -> None:
        self._fraction = self.decay.draw(self._n, random)
        self._rows = torch.arange(self._n, device=self._device) * self.env.n_states
        self._table = torch.zeros(self._n * self.env.n_states, self.env.n_actions, device=self._device)

    def _best(self) -> Tensor:
        values = self._table[self._rows + self.env.state.reshape(-1)]
        return values == values.amax(-1, keepdim=True)

    def _epsilon(self, progress: float) -> Tensor:
        return self.decay.at(progress, self._fraction)

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        best = torch.where(terminated, 0.0, self._table[self._rows + following].amax(-1))
        place = (self._rows + state) * self.env.n_actions + action
        values = self._table.view(-1)
        before = values[place]
        values[place] = before + self.learning_rate * (reward + self.gamma * best - before)
