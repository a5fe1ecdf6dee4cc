"""Controllers of ``coef`` in ``reward - coef * KL``: constant, scheduled, adaptive and Lagrangian."""

from __future__ import annotations

import operator
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Real
from typing import Annotated, Any, ClassVar, Self, final

import numpy as np
import torch
from torch import Tensor, nn

from torchrl_lang._checks import NonNegative, Positive, check_options, checked, torchrl_names


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
        TypeError: it is not one number.

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
    _moves: ClassVar[bool] = False  # whether .to(...) converts it

    def __init__(self, coef: Tensor | float, allowed: str = "[0, inf)") -> None:
        super().__init__()
        self._process = os.getpid()
        theirs = " (a controller is one of this library: torchrl_lang.transforms.AdaptiveKLController)"
        check_options(coef=(one_number("coef", coef, theirs), allowed))
        # On the CPU under torch.device(...), too, which building a model on a GPU or on "meta" may have set.
        value = coef.item() if isinstance(coef, Tensor) else float(coef)
        self.register_buffer("coef", torch.tensor(value, dtype=self._dtype, device="cpu"))

    def forward(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The present coefficient, a new ``[]`` on the CPU, in the dtype of what it multiplies."""
        self._warn_if_stale()
        return self.coef.to(dtype, copy=True)

    @torchrl_names(kl_values="kl")
    @torch.no_grad()
    def update(self, kl: Tensor | float, n: int = 1) -> None:
        """Adapt the coefficient to a measured KL. Synchronizes with the device of ``kl``.

        Args:
            kl: the mean of ``n`` measurements, in nats, one number. An estimate may be negative.
            n: number of measurements behind ``kl``: actions on steps, sequences on rows and utterances.

        Raises:
            ValueError: ``kl`` is not one finite number, or ``n`` is less than 1. The coefficient is unchanged then.
            TypeError: ``kl`` is not one number; TorchRL's ``kl_values`` are a list of rewards ``-coef * KL``.
        """
        self._warn_if_stale()
        theirs = " in nats (of TorchRL's kl_values, rewards -coef * KL, give update(-mean / coef, n=len(...)))"
        value = one_number("kl", kl, theirs)
        check_options(kl=(value, "(-inf, inf)"), n=(n, 1))
        self._update(value, operator.index(n))

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
        if probe.is_cpu and probe.is_shared():
            return self.share_memory()
        return super()._apply(fn, recurse) if self._moves else self

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
        found = f"This {type(self).__name__} is not shared: updates in the process that made it do not arrive here"
        warnings.warn(f"{found}. Call share_memory() before it is sent to workers.", RuntimeWarning, stacklevel=3)

    def extra_repr(self) -> str:
        """The present state and the options."""
        state = [f"{name}={float(buffer):g}" for name, buffer in self.named_buffers()]
        options = [f"{name}={value}" for name, value in vars(self).items() if name[0] != "_" and name != "training"]
        return ", ".join([*state, *options, "shared"] if self.shared else [*state, *options])


def one_number(name: str, value: Tensor | float, advice: str = "") -> float:
    """The value of a number or of a tensor with one element, rounded to float32; TypeError for anything else."""
    if not isinstance(value, (Real, Tensor, np.ndarray)) or torch.as_tensor(value).numel() != 1:
        raise TypeError(f"{name} must be one number{advice}, got {value!r:.200}.")
    return torch.as_tensor(value, dtype=torch.float32, device="cpu").item()


class ConstantKLController(KLController):
    """A constant coefficient; :meth:`update` checks its arguments and changes nothing.

    Args:
        coef: finite and at least 0.
        kl_coef: the same, by the name of TorchRL's class.

    Examples:
        >>> from torchrl_lang.modules.controllers import ConstantKLController
        >>> controller = ConstantKLController(0.5)
        >>> controller.update(20.0)
        >>> controller()
        tensor(0.5000)
    """

    _dtype: ClassVar[torch.dtype] = torch.float64
    _changes: ClassVar[bool] = False

    __init__ = torchrl_names(kl_coef="coef")(KLController.__init__)

    @torchrl_names(kl_values="kl")
    def update(self, kl: Tensor | float = 0.0, n: int = 1) -> None:
        """Check the arguments, which may be left out; nothing changes."""
        super().update(kl, n)

    def _update(self, kl: float, n: int) -> None:
        pass


class NumberKLController(ConstantKLController):
    """The coefficient of a transform that was given a number: a float32 buffer, which ``.to(...)`` converts."""

    _dtype: ClassVar[torch.dtype] = torch.float32
    _moves: ClassVar[bool] = True


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
            check_options(coef=(coef, "[0, inf)"))
        if not knots or knots[0][0] < 0 or not all(left < right for (left, _), (right, _) in pairwise(knots)):
            raise ValueError(f"knots must be pairs (seen, coef), strictly increasing from 0 or later, got {knots}.")
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


@final
class AdaptiveKLController(KLController):
    """A coefficient that rises while the KL is above a target and falls while it is below.

    ``e = clip(KL / target - 1, -c, c)`` and ``coef <- coef * (1 + e * n / horizon)``: Ziegler et al. 2019 (arXiv
    1909.08593, section 2.2, with ``K_beta = n / horizon``). ``n / horizon`` is at most 1, so that the factor stays
    within ``1 - c`` and ``1 + c`` however many measurements come at once.

    Args:
        coef: the initial coefficient, within the bounds.
        target: the KL to reach, above 0, in nats for each measurement: of an action on steps, of a sequence (an episode
            or a turn) on rows and utterances. The paper's is that of a sequence.
        horizon: measurements over which the coefficient may change by the factor ``1 + c``, above 0. The default is
            the paper's, in sequences; on steps it counts actions.
        clip: ``c``, above 0 and below 1.
        min_coef: lower bound, above 0, since a factor cannot leave 0.
        max_coef: upper bound.
        init_kl_coef: the initial coefficient, by the name of TorchRL's class.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: there is no initial coefficient, or two.

    Examples:
        >>> from torchrl_lang.modules.controllers import AdaptiveKLController
        >>> controller = AdaptiveKLController(0.5, target=6.0, horizon=100)
        >>> controller.update(12.0, n=50)  # twice the target, clipped to 0.2, over half a horizon
        >>> controller()
        tensor(0.5500)
    """

    @torchrl_names(init_kl_coef="coef")
    @checked
    def __init__(
        self,
        coef: Tensor | float,
        *,
        target: Positive,
        horizon: Positive = 10_000,
        clip: Annotated[float, "(0, 1)"] = 0.2,
        min_coef: Positive = 1e-8,
        max_coef: float = 1e8,
    ) -> None:
        super().__init__(coef, f"[{min_coef}, {max_coef}]")
        self.target, self.horizon, self.clip, self.min_coef, self.max_coef = target, horizon, clip, min_coef, max_coef

    def _update(self, kl: float, n: int) -> None:
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        factor = 1 + error * min(n / self.horizon, 1.0)
        self.coef.fill_(min(max(float(self.coef) * factor, self.min_coef), self.max_coef))


@final
class LagrangeKLController(KLController):
    """A coefficient that enforces ``KL <= target``: the multiplier of that constraint, by dual ascent.

    ``lambda <- clamp(lambda + lr * (KL - target), 0, max_coef)`` and ``coef = clamp(lambda + proportional * (KL -
    target), 0, max_coef)``. The proportional term is the PI control of the multiplier of Stooke et al. 2020 (arXiv
    2007.03964), which damps oscillations. Where the constraint is inactive the coefficient goes to 0. Each update is
    one step, however many measurements it stands for.

    Args:
        coef: the initial multiplier, within 0 and ``max_coef``.
        target: the KL allowed, above 0, in nats for each measurement: of an action on steps, of a sequence (an episode
            or a turn) on rows and utterances.
        lr: step of the ascent, above 0.
        proportional: weight of the present violation, at least 0.
        max_coef: upper bound, which limits how far the multiplier climbs while nothing brings the KL down, e.g. before
            the policy trains.

    Raises:
        ValueError: an argument is out of its range.

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

    @checked
    def __init__(
        self,
        coef: Tensor | float = 0.0,
        *,
        target: Positive,
        lr: Positive = 0.1,
        proportional: NonNegative = 0.0,
        max_coef: Positive = 100.0,
    ) -> None:
        super().__init__(coef, f"[0, {max_coef}]")
        self.register_buffer("multiplier", self.coef.clone())
        self.target, self.lr, self.proportional, self.max_coef = target, lr, proportional, max_coef

    def _update(self, kl: float, n: int) -> None:
        violation = kl - self.target
        multiplier = self._bounded(float(self.multiplier) + self.lr * violation)
        self.multiplier.fill_(multiplier)
        self.coef.fill_(self._bounded(multiplier + self.proportional * violation))

    def _bounded(self, value: float) -> float:
        return min(max(value, 0.0), self.max_coef)
