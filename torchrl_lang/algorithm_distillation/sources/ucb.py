"""UCB1 on many bandits at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_lang._checks import finite
from torchrl_lang._random_stream import RandomStream
from torchrl_lang.algorithm_distillation.sources.tabular import TabularSource
from torchrl_lang.envs.grids import HiddenTaskEnv

__all__ = ["UCB"]


class UCB(TabularSource):
    r"""UCB1 (Auer, Cesa-Bianchi and Fischer 2002), over all episodes of a stream.

    Each arm is pulled once, in random order; then the arm with the largest

    .. math:: \bar r_a + c \sqrt{2 \ln t / n_a}

    after ``t`` pulls, ``n_a`` of them of arm ``a`` with the mean reward :math:`\bar r_a`. Ties are broken uniformly.

    Args:
        env, steps, seed: as in :class:`~torchrl_lang.algorithm_distillation.sources.TabularSource`; ``env`` has one
        state.
        exploration: the ``c`` of the formula; 1 is UCB1.

    Raises:
        ValueError: ``env`` has several states, or ``exploration`` is negative or not finite.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation.sources import UCB
        >>> from torchrl_lang.envs.grids import BernoulliBanditEnv
        >>> env = BernoulliBanditEnv(torch.tensor([[0.1, 0.9, 0.1]]), task=0, batch_size=[1, 8])
        >>> action = UCB(env, 200).history()["action"]
        >>> action[..., :3].sort(-1).values.unique(dim=1), bool((action[..., 100:] == 1).float().mean() > 0.7)
        (tensor([[[0, 1, 2]]]), True)
    """

    def __init__(self, env: HiddenTaskEnv, steps: int, *, exploration: float = 1.0, seed: int = 0) -> None:
        super().__init__(env, steps, seed=seed)
        if env.n_states != 1:
            raise ValueError(f"UCB needs a task with one state, a bandit; {type(env).__name__} has {env.n_states}.")
        finite("exploration", exploration)
        self.exploration = exploration

    def options(self) -> dict[str, Any]:
        """The options of the algorithm as JSON."""
        return {"exploration": self.exploration}

    def _begin(self, random: RandomStream) -> None:
        self._pulls = torch.zeros(self._n, self.env.n_actions, dtype=torch.float64, device=self._device)
        self._earned = torch.zeros_like(self._pulls)
        self._zero = torch.zeros(self._n, device=self._device)

    def _best(self) -> Tensor:
        # Every row has made the same number of pulls.
        bonus = (2 * self._pulls[0].sum().clamp_min(1).log() / self._pulls).sqrt()
        score = self._earned / self._pulls + self.exploration * bonus
        score = torch.where(self._pulls == 0, torch.inf, score)
        return score == score.amax(-1, keepdim=True)

    def _epsilon(self, progress: float) -> Tensor:
        return self._zero

    def _learn(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, terminated: Tensor) -> None:
        place = action[:, None]
        self._pulls.scatter_add_(1, place, torch.ones_like(place, dtype=torch.float64))
        self._earned.scatter_add_(1, place, reward[:, None].to(torch.float64))
