"""Linear layers of a model, exchanged for those by :func:`~torchrl_lang.functional.fast_linear.fast_linear`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torchrl_lang.functional.fast_linear import fast_linear
from torchrl_lang.modules.fast_linear import FastLinear


class FastConv1D(Conv1D):
    """GPT-2's linear layer, whose weight is transposed, as a :class:`~torchrl_lang.modules.fast_linear.FastLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        """``[*B, nx] -> [*B, nf]``."""
        return fast_linear(x, self.weight.mT, self.bias)


_FAST: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FastLinear, Conv1D: FastConv1D}


def use_fast_layers(model: nn.Module) -> None:
    """Exchange the classes of a model's plain linear layers, in place; parameters and names stay.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.fast_layers import use_fast_layers
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Tanh())
        >>> use_fast_layers(model)
        >>> [type(layer).__name__ for layer in model]
        ['FastLinear', 'Tanh']
    """
    layers: list[Any] = [module for module in model.modules() if type(module) in _FAST]
    for layer in layers:
        layer.__class__ = _FAST[type(layer)]
