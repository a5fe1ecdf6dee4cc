"""A Lagrange multiplier that keeps the divergence below a target."""

from __future__ import annotations

from typing import final

from torch import Tensor

from torchrl_lang.functional.checks import finite, positive, within
from torchrl_lang.modules.controllers.base import KLController

__all__ = ["LagrangeKLController"]


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
