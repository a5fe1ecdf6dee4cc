"""An exponential moving average of the weights, to evaluate and save in place of those of the last step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from torchrl_lang._checks import checked


class WeightAverage:
    """An exponential moving average of a module's weights over training steps (Polyak averaging, see arXiv 1803.05407).

    Weights of single steps are noisy while the learning rate is high, and so are the actions that they rank; the
    average is not. It costs one copy of the trained weights and no pass of the model.

    The average covers the parameters that require a gradient, and the target parameters of a TorchRL loss, which are
    its buffers whose names begin with ``target_``. After ``n`` steps the decay is at most ``(1 + n) / (10 + n)``, so
    that the initial weights have vanished from the average also in a short run.

    Args:
        module: its weights are trained in place, such as a loss module.
        decay: of the average: about ``1 / (1 - decay)`` steps are averaged; from 0, the weights of the last step, to 1,
            exclusive.

    Raises:
        ValueError: ``decay`` is outside its range.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import WeightAverage
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(net, decay=0.99)
        >>> for step in range(1000):
        ...     _ = net.weight.data.fill_(step % 2)  # weights that jump between 0 and 1
        ...     average.update()
        >>> with average.applied():
        ...     print(round(net.weight.item(), 1))
        0.5
        >>> net.weight.item()
        1.0
    """

    @checked
    def __init__(self, module: nn.Module, decay: Annotated[float, "[0, 1)"]) -> None:
        self.module, self.decay = module, decay
        # In float32 at least: in bfloat16 the steps of an average would be rounded away.
        weights = self._weights().items()
        self._average = {name: w.to(torch.promote_types(w.dtype, torch.float32), copy=True) for name, w in weights}
        self._steps = 0

    def update(self) -> None:
        """Add the present weights to the average; to be called after each step of the optimizer."""
        self._steps += 1
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        for name, weight in self._weights().items():
            self._average[name].lerp_(weight.to(self._average[name].dtype), 1 - decay)

    def apply(self) -> None:
        """Replace the module's weights with their average."""
        self._write(self._average)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the module has the average of its weights."""
        present = {name: weight.clone() for name, weight in self._weights().items()}
        self.apply()
        try:
            yield
        finally:
            self._write(present)

    def state_dict(self) -> dict[str, Any]:
        """The average, and the number of steps in it."""
        return {"average": self._average, "steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state.

        Raises:
            KeyError: it is of other weights.
        """
        average = state_dict["average"]
        if average.keys() != self._average.keys():
            raise KeyError(f"The state is an average of {sorted(average)}, the weights are {sorted(self._average)}.")
        for name, weight in average.items():
            self._average[name].copy_(weight)
        self._steps = int(state_dict["steps"])

    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights().items():
            weight.copy_(values[name])

    def _weights(self) -> dict[str, Tensor]:
        trained = ((name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad)
        targets = ((name, buffer) for name, buffer in self.module.named_buffers() if name.startswith("target_"))
        return {name: weight.detach() for name, weight in chain(trained, targets)}
