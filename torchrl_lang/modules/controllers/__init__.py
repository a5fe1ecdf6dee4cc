"""Controllers of the KL coefficient ``coef`` in ``reward - coef * KL``, which adapt it to the measured KL."""

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
