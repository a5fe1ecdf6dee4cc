"""What every controller of the KL coefficient is: ``coef`` of ``reward - coef * KL``, updated by the measured KL."""

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
    """The coefficient of ``reward - coef * KL``, a module that is called for it and updated by the measured KL.

    What changes is in buffers, so in the ``state_dict``; what was given to the constructor is not. The buffers are
    scalars on the CPU that ``.to(...)``, ``.cuda()`` and ``.half()`` leave alone, they change in place, and after
    :meth:`share_memory` the workers of a collector see each change. Without it each worker has a controller of its own,
    and says so by a ``RuntimeWarning`` at first use: it may be meant, where a worker updates its own. A rule of your
    own fills in :meth:`_update`.

    **Units.** A measurement is one number of nats: on steps the divergence of one action, on rows and utterances of one
    sequence, that is of an episode or a turn. A ``target`` is nats for each of those, and ``n`` counts them. So a
    policy has a lower KL and more measurements on steps than it has on rows.

    Args:
        coef: the coefficient at the start, finite and at least 0.

    Raises:
        ValueError: ``coef`` is no such number.

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

    _changes: ClassVar[bool] = True  # by updates, so that a copy elsewhere would miss something

    def __init__(self, coef: Tensor | float) -> None:
        super().__init__()
        self._home = os.getpid()
        self.register_buffer("coef", scalar(at_least_zero(coef, "coef")))

    def forward(self) -> Tensor:
        """The coefficient now, float32 ``[]`` on the CPU; a later update does not change what was returned."""
        self._warn_away_from_home()
        return self.coef.clone()

    @torch.no_grad()
    def update(self, kl: Tensor | float, n: int = 1) -> None:
        """Take account of a measured KL. Waits for the device of ``kl``.

        Args:
            kl: the mean of ``n`` measurements, in nats, one number. An estimate may be negative.
            n: number of measurements behind ``kl``: actions on steps, sequences on rows and utterances.

        Raises:
            ValueError: ``kl`` is not one finite number, or ``n`` is less than 1. Nothing has changed then.
        """
        self._warn_away_from_home()
        number = finite(kl, "kl")
        measurements = operator.index(n)
        if measurements < 1:
            raise ValueError(f"n, the number of measurements behind the KL, must be at least 1, got {n}.")
        self._update(number, measurements)

    @abstractmethod
    def _update(self, kl: float, n: int) -> None:
        """Change the buffers in place, each by one write: another process may read at any time."""

    def _warn_away_from_home(self) -> None:
        """Once in a process that has a copy which follows nobody else's updates."""
        if not self._changes or self.shared or torch.compiler.is_compiling() or self._home == os.getpid():
            return
        self._home = os.getpid()
        warnings.warn(
            f"This {type(self).__name__} was made in another process and is not shared with it: updates there do not "
            "arrive here, nor the other way round. Call controller.share_memory() before it goes to workers; where "
            "each worker is to update its own, or nobody, ignore this.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _options(self) -> dict[str, object]:
        """What :meth:`extra_repr` shows beside the coefficient."""
        return {}

    def extra_repr(self) -> str:
        """The coefficient now, and the options."""
        shown = [f"coef={float(self.coef):g}", *(f"{name}={value}" for name, value in self._options().items())]
        return ", ".join([*shown, "shared"] if self.shared else shown)
