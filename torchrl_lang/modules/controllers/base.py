"""The base of KL controllers: ``coef`` of ``reward - coef * KL``, updated by the measured KL."""

from __future__ import annotations

import operator
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from torchrl_lang._checks import finite

__all__ = ["KLController"]


class KLController(nn.Module, ABC):
    """The coefficient of ``reward - coef * KL``: calling it returns the coefficient, :meth:`update` changes it.

    The state is in the buffers, scalars on the CPU that ``.to(...)``, ``.cuda()`` and ``.half()`` leave alone: they
    multiply tensors of any device without a synchronization. Subclasses implement :meth:`_update`.

    After :meth:`share_memory` the workers of a collector or a ``ParallelEnv`` see each change. Without it each worker
    has its own copy, which warns (``RuntimeWarning``) at first use.

    **Units.** A measurement is one number of nats: on steps the divergence of one action, on rows and utterances that
    of one sequence (an episode or a turn). A ``target`` is nats for each of those, and ``n`` counts them. So a policy
    has a lower KL and more measurements on steps than on rows.

    Args:
        coef: the initial coefficient, finite and at least 0.

    Raises:
        ValueError: ``coef`` is no such number.

    Examples:
        >>> import pickle
        >>> from torchrl_lang.modules.controllers import KLController, LagrangeKLController
        >>> class Doubling(KLController):
        ...     def _update(self, kl, n):
        ...         self.coef.fill_(2 * float(self.coef))
        >>> controller = Doubling(0.25)
        >>> controller.update(3.0)
        >>> controller
        Doubling(coef=0.5)
        >>> shared = LagrangeKLController(0.5, target=2.0).share_memory()
        >>> pickle.loads(pickle.dumps(shared)).update(7.0)  # for instance in a worker
        >>> shared()
        tensor(1.)
    """

    coef: Tensor
    """``[]`` on the CPU, float64 where no measurement changes it, otherwise float32."""

    _dtype: ClassVar[torch.dtype] = torch.float32
    _changes: ClassVar[bool] = True  # whether updates change it, so that a copy in a worker becomes stale

    def __init__(self, coef: Tensor | float) -> None:
        super().__init__()
        self._process = os.getpid()
        finite("coef", one_number("coef", coef))
        # On the CPU under torch.device(...), too, which building a model on a GPU or on "meta" may have set.
        value = coef.item() if isinstance(coef, Tensor) else float(coef)
        self.register_buffer("coef", torch.tensor(value, dtype=self._dtype, device="cpu"))

    def forward(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The present coefficient, a new ``[]`` on the CPU, in the dtype of what it multiplies."""
        self._warn_if_stale()
        return self.coef.to(dtype, copy=True)

    @torch.no_grad()
    def update(self, kl: Tensor | float, n: int = 1) -> None:
        """Adapt the coefficient to a measured KL. Synchronizes with the device of ``kl``.

        Args:
            kl: the mean of ``n`` measurements, in nats, one number. An estimate may be negative.
            n: number of measurements behind ``kl``: actions on steps, sequences on rows and utterances.

        Raises:
            ValueError: ``kl`` is not one finite number, or ``n`` is less than 1. The coefficient is unchanged then.
        """
        self._warn_if_stale()
        value, measurements = one_number("kl", kl), operator.index(n)
        finite("kl", value, low=None)
        if measurements < 1:
            raise ValueError(f"n, the number of measurements behind the KL, must be at least 1, got {n}.")
        self._update(value, measurements)

    @abstractmethod
    def _update(self, kl: float, n: int) -> None:
        """Change the buffers in place, each by one write: another process may read at any time."""

    @property
    def shared(self) -> bool:
        """Whether the buffers are in shared memory."""
        return self.coef.is_shared()

    def share_memory(self) -> Self:
        """Move the buffers to memory that is shared with every process which receives this module.

        It may be sent by pickle, cloudpickle, spawn or fork; changes in place and ``load_state_dict`` are seen by all.
        There is no lock: only one process should write. Copies of a shared module are shared, too, since TorchRL copies
        what it sends to workers. Keep the module alive until the workers have received it.
        """
        for buffer in self.buffers():
            buffer.untyped_storage()._share_filename_cpu_()  # does nothing the second time
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # share_memory() of a module that contains this one arrives here as a function of tensors, as .to() does.
        probe = fn(torch.zeros((), device="cpu"))
        return self.share_memory() if probe.is_cpu and probe.is_shared() else self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Copies: torch moves tensors that it sends to another process to other memory.
        destination.update({prefix + name: buffer.clone() for name, buffer in self.named_buffers()})

    # Torch's shared tensors are copied by the cloudpickle with which TorchRL sends environment factories to workers,
    # so a shared controller pickles the names of its memory.
    def __getstate__(self) -> dict[str, Any]:
        if not self.shared:
            return self.__dict__.copy()
        memory = {n: (*b.untyped_storage()._share_filename_cpu_(), b.dtype) for n, b in self.named_buffers()}
        return {**self.__dict__, "_buffers": {}, "_memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        memory = state.pop("_memory", {})
        super().__setstate__(state)
        for name, (manager, file, size, dtype) in memory.items():
            storage = torch.UntypedStorage._new_shared_filename_cpu(manager, file, size)
            self._buffers[name] = torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(())

    def _warn_if_stale(self) -> None:
        """Warn once in a process that has an unshared copy."""
        if not self._changes or torch.compiler.is_compiling() or self._process == os.getpid() or self.shared:
            return
        self._process = os.getpid()
        warnings.warn(
            f"This {type(self).__name__} was made in another process and is not shared with it: updates there do not "
            "arrive here, nor the other way round. Call controller.share_memory() before it is sent to workers, or "
            "ignore this if each worker is meant to have its own.",
            RuntimeWarning,
            stacklevel=3,
        )

    def extra_repr(self) -> str:
        """The present state and the options."""
        state = [f"{name}={float(buffer):g}" for name, buffer in self.named_buffers()]
        options = [f"{name}={value}" for name, value in vars(self).items() if name[0] != "_" and name != "training"]
        return ", ".join([*state, *options, "shared"] if self.shared else [*state, *options])


def one_number(name: str, value: Tensor | float) -> float:
    """The value of a number or of a tensor with one element, rounded to float32.

    Raises:
        ValueError: the tensor has more elements, or none.
        TypeError: it is no number.
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {tuple(value.shape)}: take its mean.")
    if isinstance(value, str):
        raise TypeError(f"{name} must be a number or a tensor of one, got {value!r}.")
    return torch.as_tensor(value, dtype=torch.float32, device="cpu").item()
