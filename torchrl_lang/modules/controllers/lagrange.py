"""A Lagrange multiplier that keeps the divergence below a target."""

from __future__ import annotations

from typing import final

from torch import Tensor

from torchrl_lang.modules.controllers.base import KLController
from torchrl_lang.modules.controllers.numbers import above_zero, at_least_zero, finite

__all__ = ["LagrangeKLController"]


@final
class LagrangeKLController(KLController):
    """A coefficient that enforces ``KL <= target``: the multiplier of that constraint, by dual ascent.

    ``lambda <- clamp(lambda + lr * (KL - target), 0, max_coef)`` and ``coef = clamp(lambda + proportional * (KL -
    target), 0, max_coef)``. With a proportional term this is the PI control of the multiplier of Stooke et al. 2020
    (arXiv 2007.03964), which damps oscillations around the target. While the constraint is inactive the coefficient
    goes to 0. Each update is one step, whatever its number of measurements.

    Args:
        coef: initial multiplier, between 0 and ``max_coef``.
        target: the maximal KL, above 0, in nats per measurement: per action for steps, per sequence (an episode or a
            turn) for rows and utterances.
        lr: step size of the ascent, above 0.
        proportional: weight of the current violation, at least 0.
        max_coef: upper bound. It limits how far the multiplier rises while nothing reduces the KL (a policy that does
            not train yet, an outlier batch), because it takes as long to fall again.

    Raises:
        ValueError: an argument is out of range.

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
        self.target = above_zero(target, "target")
        self.lr = above_zero(lr, "lr")
        self.proportional = at_least_zero(proportional, "proportional")
        self.max_coef = above_zero(max_coef, "max_coef")
        if finite(coef, "coef") > self.max_coef:
            raise ValueError(f"coef must be at most max_coef={max_coef}, got {coef}.")

    def _update(self, kl: float, n: int) -> None:
        violation = kl - self.target
        multiplier = self._bounded(float(self.multiplier) + self.lr * violation)
        self.multiplier.fill_(multiplier)
        self.coef.fill_(self._bounded(multiplier + self.proportional * violation))

    def _bounded(self, value: float) -> float:
        return min(max(value, 0.0), self.max_coef)

    def _options(self) -> dict[str, object]:
        options = {"target": self.target, "lr": self.lr, "proportional": self.proportional, "max_coef": self.max_coef}
        return {"multiplier": f"{float(self.multiplier):g}", **options}
