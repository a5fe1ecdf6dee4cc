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
    (arXiv 2007.03964), which damps the swing about the target. Where the constraint is inactive the
    coefficient goes to 0. One step an update, however many measurements it stands for.

    Args:
        coef: the multiplier at the start, within 0 and ``max_coef``.
        target: the KL allowed, above 0, in nats for each measurement: of an action on steps, of a sequence (an episode
            or a turn) on rows and utterances.
        lr: step of the ascent, above 0.
        proportional: weight of the present violation, at least 0.
        max_coef: upper bound. While nothing brings the KL down (a policy not yet training, one wild batch) the
            multiplier climbs, and needs as long to come down again; at 100 the KL has long outweighed rewards of
            order 1.

    Raises:
        ValueError: an argument lies outside what is said above.

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
