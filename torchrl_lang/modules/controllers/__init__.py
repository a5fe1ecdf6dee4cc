"""Controllers of ``coef`` in ``reward - coef * KL``: constant, scheduled, adaptive and Lagrangian."""

from torchrl_lang.modules.controllers.adaptive import AdaptiveKLController, LagrangeKLController
from torchrl_lang.modules.controllers.base import KLController
from torchrl_lang.modules.controllers.fixed import ConstantKLController, ScheduledKLController, as_controller

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "KLController",
    "LagrangeKLController",
    "ScheduledKLController",
    "as_controller",
]
