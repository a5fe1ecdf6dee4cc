"""A KL coefficient that adapts to reach a target KL."""

from __future__ import annotations

from typing import final

from torch import Tensor

from torchrl_lang.modules.controllers.base import KLController
from torchrl_lang.modules.controllers.numbers import above_zero, at_least_zero, finite

__all__ = ["AdaptiveKLController"]


@final
class AdaptiveKLController(KLController):
    """A coefficient that rises while the KL is above a target and falls while it is below.

    ``e = clip(KL / target - 1, -c, c)`` and ``coef <- coef * (1 + e * n / horizon)``: Ziegler et al. 2019 (arXiv
    1909.08593, section 2.2, with ``K_beta = n / horizon``). ``n / horizon`` is clipped to 1, so that the factor stays
    positive, within ``1 - c`` and ``1 + c``, for any number of measurements.

    Args:
        coef: initial coefficient, within the bounds.
        target: the desired KL, above 0, in nats per measurement: per action for steps, per sequence (an episode or a
            turn) for rows and utterances. The paper's is per sequence.
        horizon: number of measurements over which the coefficient may change by the factor ``1 + c``, above 0. The
            default is the paper's, in sequences; for steps it counts actions.
        clip: ``c``, above 0 and below 1.
        min_coef: lower bound, above 0, because a coefficient that underflows to 0 would never rise again.
        max_coef: upper bound.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> from torchrl_lang.modules.controllers import AdaptiveKLController
        >>> controller = AdaptiveKLController(0.5, target=6.0, horizon=100)
        >>> controller.update(12.0, n=50)  # twice the target, clipped to 0.2, over half a horizon
        >>> controller()
        tensor(0.5500)
    """

    def __init__(
        self,
        coef: Tensor | float,
        *,
        target: float,
        horizon: float = 10_000,
        clip: float = 0.2,
        min_coef: float = 1e-8,
        max_coef: float = 1e8,
    ) -> None:
        super().__init__(coef)
        self.target = above_zero(target, "target")
        self.horizon = above_zero(horizon, "horizon")
        self.clip = above_zero(clip, "clip")
        self.min_coef = above_zero(min_coef, "min_coef")
        self.max_coef = at_least_zero(max_coef, "max_coef")
        if self.clip >= 1:
            raise ValueError(f"clip must be below 1, or one update could turn the coefficient's sign, got {clip}.")
        if not self.min_coef <= finite(coef, "coef") <= self.max_coef:
            raise ValueError(f"coef must lie within min_coef={min_coef} and max_coef={max_coef}, got {coef}.")

    def _update(self, kl: float, n: int) -> None:
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        factor = 1 + error * min(n / self.horizon, 1.0)
        self.coef.fill_(min(max(float(self.coef) * factor, self.min_coef), self.max_coef))

    def _options(self) -> dict[str, object]:
        return {"target": self.target, "horizon": self.horizon, "clip": self.clip}
