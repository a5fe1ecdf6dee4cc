"""Weights of the policy's loss by learned advantages, which the losses with Q and V share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from torchrl_lang._checks import finite, one_of, positive
from torchrl_lang.functional import advantage_weight

__all__ = ["AdvantageWeights"]


class AdvantageWeights:
    """Part of a loss whose policy is weighted by :func:`~torchrl_lang.functional.advantage_weight`."""

    actor_weight: float
    transition_weight: float

    def _set_advantage_weights(
        self, temperature: float, weighting: Literal["exp", "sign"], clip: float | None, transition_weight: float
    ) -> None:
        """Check and set the options of the weights."""
        one_of("advantage_weighting", weighting, ("exp", "sign"))
        if clip is not None:
            positive("weight_clip", clip)
        finite("advantage_temperature", temperature)
        finite("transition_weight", transition_weight)
        self.advantage_temperature, self.advantage_weighting = temperature, weighting
        self.weight_clip, self.transition_weight = clip, transition_weight

    @property
    def _weighs_advantages(self) -> bool:
        return bool(self.actor_weight) and (self.advantage_weighting == "sign" or self.advantage_temperature != 0)

    @property
    def _transition_weight(self) -> float:
        return self.transition_weight if self.weight_clip is None else min(self.transition_weight, self.weight_clip)

    def _advantage_weight(self, advantage: Tensor) -> Tensor:
        return advantage_weight(advantage, self.advantage_temperature, self.advantage_weighting, self.weight_clip)
