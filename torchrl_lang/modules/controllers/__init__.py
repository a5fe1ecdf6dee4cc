"""Controllers of the KL coefficient: what ``coef`` is in ``reward - coef * KL``, and how a measured KL changes it."""

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
