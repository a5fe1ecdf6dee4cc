"""Metrics of training steps: plain numbers, and checks for losses, gradients and weights that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrl_lang.modules.sharding import local_part

Scalar = int | float


def to_scalars(figures: Mapping[Any, Any] | TensorDictBase) -> dict[Any, Scalar]:
    """Convert numbers and one-element tensors to plain numbers; tensors are copied together, once per device.

    Nested entries of a tensordict are named ``outer/inner``.

    Raises:
        ValueError: a tensor has more than one element.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training.metrics import to_scalars
        >>> to_scalars({"loss": torch.tensor(0.5), "solved": torch.tensor([3]), "rate": 0.25})
        {'loss': 0.5, 'solved': 3, 'rate': 0.25}
    """
    if isinstance(figures, TensorDictBase):
        figures = {str(key): value for key, value in figures.flatten_keys("/").items()}
    tensors = {key: value.detach() for key, value in figures.items() if isinstance(value, Tensor)}
    for key, value in tensors.items():
        if value.numel() != 1:
            raise ValueError(f"'{key}' has shape {tuple(value.shape)}, but a metric is one number: use its mean.")
    fetched: dict[Any, float] = {}
    for device in {value.device for value in tensors.values()}:
        here = {key: value for key, value in tensors.items() if value.device == device}
        numbers = torch.stack([value.reshape(()).to(torch.float64) for value in here.values()]).tolist()
        fetched |= dict(zip(here, numbers, strict=True))
    whole = {key for key, value in tensors.items() if not value.is_floating_point() and value.dtype != torch.bool}
    whole |= {key for key, value in figures.items() if isinstance(value, int) and not isinstance(value, bool)}
    return {key: (int if key in whole else float)(fetched.get(key, value)) for key, value in figures.items()}


def mean_figures(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of each figure over batches or steps that all have it."""
    return {key: torch.stack([part[key].float() for part in parts]).mean() for key in parts[0]}


GRAD_NORM = "grad_norm"


class NonFiniteError(ArithmeticError):
    """A loss, a gradient or a weight became NaN or infinite in training.

    Args:
        terms: their names and values.
        when: the step, such as ``"at step 137"``.
    """

    def __init__(self, terms: Mapping[str, float], when: str) -> None:
        self.terms, self.when = dict(terms), when
        shown = ", ".join(f"{name} is {value}" for name, value in terms.items())
        super().__init__(
            f"{shown} {when}: training was stopped, earlier checkpoints are kept. Train in another folder with a "
            "smaller learning rate or smaller weights of the losses."
        )


class FiniteCheck:
    """Checks the metrics of training steps and raises at the first step whose loss or gradient is not finite.

    On a CPU each step is checked when it is added. On other devices metrics stay there and are copied together, after
    ``every`` steps or on :meth:`check`, so that steps do not synchronize.

    Args:
        every: number of steps whose metrics are copied together.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import FiniteCheck
        >>> finite = FiniteCheck()
        >>> finite.add(1, {"loss_actor": torch.tensor(0.5), "loss": torch.tensor(0.5)})
        >>> finite.add(2, {"loss_actor": torch.tensor(torch.nan), "loss": torch.tensor(torch.nan)})
        Traceback (most recent call last):
            ...
        torchrl_lang.training.metrics.NonFiniteError: loss_actor is nan at step 2: training was stopped, ...
    """

    def __init__(self, every: int = 32) -> None:
        self.every = every
        self._waiting: list[tuple[int, dict[str, Tensor]]] = []

    def add(self, step: int, figures: Mapping[str, Tensor]) -> None:
        """Add a step's ``loss_*``, their sum ``loss`` and ``grad_norm`` to the check, which runs now or later."""
        self._waiting.append((step, dict(figures)))
        if len(self._waiting) >= self.every or figures["loss"].device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Check all added steps; synchronizes with their device.

        Raises:
            NonFiniteError: a step's loss or gradient is not finite.
        """
        waiting, self._waiting = self._waiting, []
        named = [((step, name), value) for step, figures in waiting for name, value in figures.items()]
        numbers = to_scalars({key: value for key, value in named if key[1].startswith(("loss", GRAD_NORM))})
        bad = {key: value for key, value in numbers.items() if not math.isfinite(value)}
        if bad:
            first = min(step for step, _ in bad)
            values = {name: value for (step, name), value in bad.items() if step == first}
            terms = {name: value for name, value in values.items() if name.startswith("loss_")}
            raise NonFiniteError(terms or values, f"at step {first}")


def check_parameters(module: nn.Module, when: str) -> None:
    """Raise if a trained parameter of a module is not finite; synchronizes with the device once.

    Raises:
        NonFiniteError: names the first of these parameters, and ``when`` it was.
    """
    trained = {name: local_part(value.detach()) for name, value in module.named_parameters() if value.requires_grad}
    for name in _nonfinite(trained)[:1]:
        value = trained[name]
        raise NonFiniteError({f"the parameter {name}": float(value[~value.isfinite()][0])}, when)


def nonfinite_parameters(objects: Mapping[str, Any]) -> list[str]:
    """Names (``object/parameter``) of the parameters of modules and optimizers that contain NaN or infinity.

    Synchronizes with each device once.
    """
    found = (named for key, item in objects.items() for named in _parameters(key, item))
    return _nonfinite({name: local_part(value) for name, value in found})


def _nonfinite(named: Mapping[str, Tensor]) -> list[str]:
    finite = {name: x.isfinite().all() for name, x in named.items() if x.is_floating_point() and x.numel()}
    return [name for name, good in to_scalars(finite).items() if not good]


def _parameters(key: str, item: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(item, nn.Module):
        for name, value in item.named_parameters():
            yield f"{key}/{name}", value
    elif isinstance(item, Optimizer):
        for index, value in enumerate(value for group in item.param_groups for value in group["params"]):
            yield f"{key}/{index}", value
