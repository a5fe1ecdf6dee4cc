"""Linear layers of pretrained models, by :func:`~torchrl_lang.functional.fast_linear.fast_linear`."""

from __future__ import annotations

from torch import Tensor, nn

from torchrl_lang.functional.fast_linear import fast_linear

_LEAST_WEIGHTS = 2**16  # smaller layers gain little


class FastLinear(nn.Linear):
    """A linear layer of which products in float32 on an x86 CPU take half the time on processors not made by Intel.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.fast_linear import FastLinear, use_fast_linear
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU())
        >>> use_fast_linear(model)
        >>> model[0], model(torch.ones(5, 256)).shape
        (FastLinear(in_features=256, out_features=256, bias=True), torch.Size([5, 256]))
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[*B, in_features] -> [*B, out_features]``."""
        return fast_linear(input, self.weight, self.bias)


def use_fast_linear(model: nn.Module) -> None:
    """Make large plain linear layers of a model a :class:`FastLinear`, in place; parameters and names stay."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= _LEAST_WEIGHTS:
            module.__class__ = FastLinear
