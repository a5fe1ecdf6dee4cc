"""Controllers that adapt the coefficient to the measured divergence: until it is at a target, or below one."""

from __future__ import annotations

from typing import final

from torch import Tensor

from torchrl_lang._checks import finite, positive, within
from torchrl_lang.modules.controllers.base import KLController

__all__ = ["AdaptiveKLController", "LagrangeKLController"]


@final
class AdaptiveKLController(KLController):
    """A coefficient that rises while the KL is above a target and falls while it is below.

    ``e = clip(KL / target - 1, -c, c)`` and ``coef <- coef * (1 + e * n / horizon)``: Ziegler et al. 2019 (arXiv
    1909.08593, section 2.2, with ``K_beta = n / horizon``). ``n / horizon`` is at most 1, so that the factor stays
    within ``1 - c`` and ``1 + c`` however many measurements come at once.

    Args:
        coef: the initial coefficient, within the bounds.
        target: the KL to reach, above 0, in nats for each measurement: of an action on steps, of a sequence (an episode
            or a turn) on rows and utterances. The paper's is that of a sequence.
        horizon: measurements over which the coefficient may change by the factor ``1 + c``, above 0. The default is
            the paper's, in sequences; on steps it counts actions.
        clip: ``c``, above 0 and below 1.
        min_coef: lower bound, above 0, since a factor cannot leave 0.
        max_coef: upper bound.

    Raises:
        ValueError: an argument is out of its range.

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
        for name, value in (("target", target), ("horizon", horizon), ("clip", clip), ("min_coef", min_coef)):
            positive(name, value)
        within("clip", clip, 0, 1, inclusive=False)
        within("coef", float(self.coef), min_coef, max_coef)
        self.target, self.horizon, self.clip, self.min_coef, self.max_coef = target, horizon, clip, min_coef, max_coef

    def _update(self, kl: float, n: int) -> None:
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        factor = 1 + error * min(n / self.horizon, 1.0)
        self.coef.fill_(min(max(float(self.coef) * factor, self.min_coef), self.max_coef))


@final
class LagrangeKLController(KLController):
    """A coefficient that enforces ``KL <= target``: the multiplier of that constraint, by dual ascent.

    ``lambda <- clamp(lambda + lr * (KL - target), 0, max_coef)`` and ``coef = clamp(lambda + proportional * (KL -
    target), 0, max_coef)``. The proportional term is the PI control of the multiplier of Stooke et al. 2020 (arXiv
    2007.03964), which damps oscillations. Where the constraint is inactive the coefficient goes to 0. Each update is
    one step, however many measurements it stands for.

    Args:
        coef: the initial multiplier, within 0 and ``max_coef``.
        target: the KL allowed, above 0, in nats for each measurement: of an action on steps, of a sequence (an episode
            or a turn) on rows and utterances.
        lr: step of the ascent, above 0.
        proportional: weight of the present violation, at least 0.
        max_coef: upper bound, which limits how far the multiplier climbs while nothing brings the KL down, e.g. before
            the policy trains.

    Raises:
        ValueError: an argument is out of its range.

    Examples:
        >>> from torchrl_lang.modules.controllers import LagrangeKLController
        >>> controller = LagrangeKLController(target=2.0, lr=0.1)
        >>> controller.update(7.0)
        >>> controller()
        tensor(0.5000)
        >>> for _ in range(6):  # within the constraint: less by 0.1 each time, to 0
        ...     controller.update(1.0)
        >>> controller()
        tensor(0.)
    """

    multiplier: Tensor
    """float32 ``[]``: ``lambda``."""

    def __init__(
        self,
        coef: Tensor | float = 0.0,
        *,
        target: float,
        lr: float = 0.1,
        proportional: float = 0.0,
        max_coef: float = 100.0,
    ) -> None:
        super().__init__(coef)
        self.register_buffer("multiplier", self.coef.clone())
        for name, value in (("target", target), ("lr", lr), ("max_coef", max_coef)):
            positive(name, value)
        finite("proportional", proportional)
        within("coef", float(self.coef), 0, max_coef)
        self.target, self.lr, self.proportional, self.max_coef = target, lr, proportional, max_coef

    def _update(self, kl: float, n: int) -> None:
        violation = kl - self.target
        multiplier = self._bounded(float(self.multiplier) + self.lr * violation)
        self.multiplier.fill_(multiplier)
        self.coef.fill_(self._bounded(multiplier + self.proportional * violation))

    def _bounded(self, value: float) -> float:
        return min(max(value, 0.0), self.max_coef)
