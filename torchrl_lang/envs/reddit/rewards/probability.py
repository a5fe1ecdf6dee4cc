"""Rewards that are the probability of something, or whether it reaches a threshold."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torchrl_lang._checks import within
from torchrl_lang.envs.reddit.text_reward import rewards_of

__all__ = ["ProbabilityReward"]


class ProbabilityReward(ABC):
    """Base of the rewards that are probabilities; subclasses fill in :meth:`_probabilities`.

    Args:
        threshold: the reward is 1 where the probability is at least this, else 0; None: it is the probability itself.

    Raises:
        ValueError: the threshold is not in [0, 1]; on calls, a probability is not finite.

    Examples:
        >>> import torch
        >>> from torchrl_lang.envs.reddit.rewards import ProbabilityReward
        >>> class Questions(ProbabilityReward):
        ...     def _probabilities(self, texts):
        ...         return torch.tensor([0.75 if text.endswith("?") else 0.25 for text in texts])
        >>> Questions(threshold=None)(["why?", "so"]), Questions(threshold=0.5)(["why?", "so"])
        (tensor([0.7500, 0.2500]), tensor([1., 0.]))
    """

    def __init__(self, threshold: float | None) -> None:
        if threshold is not None:
            within("threshold", threshold, 0.0, 1.0)
        self.threshold = threshold

    def probabilities(self, texts: list[str]) -> Tensor:
        """The probabilities for texts, float32 ``[N]`` on the CPU."""
        return rewards_of(self._probabilities, texts) if texts else torch.zeros(0)

    def __call__(self, texts: list[str]) -> Tensor:
        """The rewards of texts, float32 ``[N]``."""
        found = self.probabilities(texts)
        return found if self.threshold is None else (found >= self.threshold).float()

    @abstractmethod
    def _probabilities(self, texts: list[str]) -> Tensor:
        """The probabilities for at least one text."""
