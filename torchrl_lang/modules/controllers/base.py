"""Base class of the controllers of the KL coefficient ``coef`` in ``reward - coef * KL``."""

from __future__ import annotations

import operator
import os
import warnings
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from torchrl_lang.modules.controllers.host_module import HostModule
from torchrl_lang.modules.controllers.numbers import at_least_zero, finite, scalar

__all__ = ["KLController"]


class KLController(HostModule, ABC):
    """The coefficient of ``reward - coef * KL``: a module that returns it, and updates it from the measured KL.

    Buffers hold what changes, so it is in the ``state_dict``; constructor arguments are not. The buffers are scalars on
    the CPU, which ``.to(...)``, ``.cuda()`` and ``.half()`` do not move or convert. They change in place, and after
    :meth:`share_memory` the workers of a collector see each change. Without it each worker has its own controller, with
    a ``RuntimeWarning`` at its first use, because this may be intended. Subclasses implement :meth:`_update`.

    **Units.** A measurement is one number of nats: the divergence of one action for steps, or of one sequence (an
    episode or a turn) for rows and utterances. ``target`` is in nats per measurement, and ``n`` counts measurements. So
    for steps the KL of a policy is lower, and the number of measurements higher, than for rows.

    Args:
        coef: initial coefficient, finite and at least 0.

    Raises:
        ValueError: ``coef`` is negative or not finite.

    Examples:
        >>> from torchrl_lang.modules.controllers import KLController
        >>> class Doubling(KLController):
        ...     def _update(self, kl, n):
        ...         self.coef.fill_(2 * float(self.coef))
        >>> controller = Doubling(0.25).share_memory()
        >>> controller.update(3.0)
        >>> controller
        Doubling(coef=0.5, shared)
    """

    coef: Tensor
    """float32 ``[]`` on the CPU."""

    _changes: ClassVar[bool] = True  # whether updates change the coefficient, which an unshared copy would miss

    def __init__(self, coef: Tensor | float) -> None:
        super().__init__()
        self._home = os.getpid()
        self.register_buffer("coef", scalar(at_least_zero(coef, "coef")))

    def forward(self) -> Tensor:
        """The current coefficient, float32 ``[]`` on the CPU; later updates do not change the returned tensor."""
        self._warn_away_from_home()
        return self.coef.clone()

    @torch.no_grad()
    def update(self, kl: Tensor | float, n: int = 1) -> None:
        """Update the coefficient from a measured KL. Synchronizes with the device of ``kl``.

        Args:
            kl: the mean of ``n`` measurements, in nats, one number. An estimate may be negative.
            n: number of measurements: actions for steps, sequences for rows and utterances.

        Raises:
            ValueError: ``kl`` is not one finite number, or ``n`` is below 1. The coefficient is not changed then.
        """
        self._warn_away_from_home()
        number = finite(kl, "kl")
        measurements = operator.index(n)
        if measurements < 1:
            raise ValueError(f"n, the number of measurements of the KL, must be at least 1, got {n}.")
        self._update(number, measurements)

    @abstractmethod
    def _update(self, kl: float, n: int) -> None:
        """Change the buffers in place, each by a single write, because other processes may read at any time."""

    def _warn_away_from_home(self) -> None:
        """Warn once in a process whose copy does not get updates from other processes."""
        if not self._changes or self.shared or torch.compiler.is_compiling() or self._home == os.getpid():
            return
        self._home = os.getpid()
        warnings.warn(
            f"This {type(self).__name__} was made in another process and is not shared with it: neither process sees "
            "the other's updates. Call controller.share_memory() before it is sent to workers; ignore this if each "
            "worker updates its own controller, or none is updated.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _options(self) -> dict[str, object]:
        """The options that :meth:`extra_repr` shows beside the coefficient."""
        return {}

    def extra_repr(self) -> str:
        """The current coefficient and the options."""
        shown = [f"coef={float(self.coef):g}", *(f"{name}={value}" for name, value in self._options().items())]
        return ", ".join([*shown, "shared"] if self.shared else shown)
