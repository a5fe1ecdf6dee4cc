"""What every controller of the KL coefficient is: ``coef`` of ``reward - coef * KL``, updated by the measured KL."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torchrl_lang.transforms.controllers.numbers import at_least_zero, finite, scalar
from torchrl_lang.transforms.shared_memory import HostModule

__all__ = ["KLController"]


class KLController(HostModule, ABC):
    """The coefficient of ``reward - coef * KL``, a module that is called for it and updated by the measured KL.

    What changes is in buffers, so in the ``state_dict``; what was given to the constructor is not. The buffers are
    scalars on the CPU that ``.to(...)``, ``.cuda()`` and ``.half()`` leave alone, they change in place, and after
    :meth:`share_memory` the workers of a collector see each change. A rule of your own fills in :meth:`_update`.

    Args:
        coef: the coefficient at the start, finite and at least 0.

    Raises:
        ValueError: ``coef`` is no such number.

    Examples:
        >>> from torchrl_lang.transforms.controllers import KLController
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

    def __init__(self, coef: Tensor | float) -> None:
        super().__init__()
        self.register_buffer("coef", scalar(at_least_zero(coef, "coef")))

    def forward(self) -> Tensor:
        """The coefficient now, float32 ``[]`` on the CPU; a later update does not change what was returned."""
        return self.coef.clone()

    @torch.no_grad()
    def update(self, kl: Tensor | float, n: int = 1) -> None:
        """Take account of a measured KL. Waits for the device of ``kl``.

        Args:
            kl: the mean KL of ``n`` episodes, one number. An estimate may be negative.
            n: number of episodes behind ``kl``.

        Raises:
            ValueError: ``kl`` is not one finite number, or ``n`` is less than 1. Nothing has changed then.
        """
        number = finite(kl, "kl")
        episodes = operator.index(n)
        if episodes < 1:
            raise ValueError(f"n, the number of episodes behind the KL, must be at least 1, got {n}.")
        self._update(number, episodes)

    @abstractmethod
    def _update(self, kl: float, n: int) -> None:
        """Change the buffers in place, each by one write: another process may read at any time."""

    def _options(self) -> dict[str, object]:
        """What :meth:`extra_repr` shows beside the coefficient."""
        return {}

    def extra_repr(self) -> str:
        """The coefficient now, and the options."""
        shown = [f"coef={float(self.coef):g}", *(f"{name}={value}" for name, value in self._options().items())]
        return ", ".join(shown if self.memory is None else [*shown, "shared"])
