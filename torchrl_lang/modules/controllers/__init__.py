"""Controllers of ``coef`` in ``reward - coef * KL``: constant, scheduled, adaptive and Lagrangian."""

from torchrl_lang.modules.controllers.adaptive import AdaptiveKLController
from torchrl_lang.modules.controllers.base import KLController
from torchrl_lang.modules.controllers.fixed import ConstantKLController, ScheduledKLController, as_controller
from torchrl_lang.modules.controllers.lagrange import LagrangeKLController

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "KLController",
    "LagrangeKLController",
    "ScheduledKLController",
    "as_controller",
]
