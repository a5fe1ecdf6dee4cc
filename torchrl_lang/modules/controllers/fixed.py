"""Controllers that ignore the measured divergence: a constant and a schedule."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from torchrl_lang._checks import finite
from torchrl_lang.modules.controllers.base import KLController

__all__ = ["ConstantKLController", "ScheduledKLController", "as_controller"]


@final
class ConstantKLController(KLController):
    """A constant coefficient; :meth:`update` checks its arguments and changes nothing.

    Args:
        coef: finite and at least 0.

    Examples:
        >>> from torchrl_lang.modules.controllers import ConstantKLController
        >>> controller = ConstantKLController(0.5)
        >>> controller.update(20.0)
        >>> controller()
        tensor(0.5000)
    """

    _dtype: ClassVar[torch.dtype] = torch.float64
    _changes: ClassVar[bool] = False

    def _update(self, kl: float, n: int) -> None:
        pass


@final
class ScheduledKLController(KLController):
    """A coefficient that is piecewise linear in the number of measurements seen, whatever their KL.

    Args:
        knots: pairs ``(seen, coef)``, ``seen`` strictly increasing from 0 or later. Measurements are actions on steps
            (so 10 episodes of 100 steps are 1000) and sequences on rows and utterances. Before the first knot and
            after the last the coefficient is constant.

    Raises:
        ValueError: there is no knot, ``seen`` does not increase, or a coefficient is not finite and at least 0.

    Examples:
        >>> from torchrl_lang.modules.controllers import ScheduledKLController
        >>> controller = ScheduledKLController([(0, 1.0), (100, 0.0)])
        >>> controller.update(3.0, n=25)
        >>> controller()
        tensor(0.7500)
    """

    _dtype: ClassVar[torch.dtype] = torch.float64

    step: Tensor
    """int64 ``[]``: measurements seen."""

    def __init__(self, knots: Sequence[tuple[int, float]]) -> None:
        knots = [(operator.index(seen), coef) for seen, coef in knots]
        for _, coef in knots:
            finite("coef of a knot", coef)
        if not knots or knots[0][0] < 0 or not all(left < right for (left, _), (right, _) in pairwise(knots)):
            raise ValueError(
                f"knots must be at least one pair (seen, coef), strictly increasing from 0 or later, got {knots}."
            )
        super().__init__(_interpolate(knots, 0))
        self.knots = knots
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device="cpu"))

    def _update(self, kl: float, n: int) -> None:
        self.step.add_(n)
        self.coef.fill_(_interpolate(self.knots, int(self.step)))


def as_controller(coef: Tensor | float | KLController) -> KLController:
    """A :class:`ConstantKLController` of a number; a controller is returned as it is.

    Raises:
        TypeError: it is neither.
        ValueError: the number is not one, finite and at least 0.

    Examples:
        >>> from torchrl_lang.modules.controllers import as_controller
        >>> as_controller(0.1)
        ConstantKLController(coef=0.1)
    """
    return coef if isinstance(coef, KLController) else ConstantKLController(coef)


def _interpolate(knots: list[tuple[int, float]], step: int) -> float:
    seen, coefs = zip(*knots, strict=True)
    return float(np.interp(step, seen, coefs))
