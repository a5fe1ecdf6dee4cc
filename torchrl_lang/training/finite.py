"""Find parameters that are no longer finite numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["nonfinite_parameters"]


def nonfinite_parameters(objects: Mapping[str, Any]) -> list[str]:
    """Names of the parameters that hold NaN or infinity, of the modules and the optimisers among ``objects``.

    Looks at values, once a device, so it waits for the device.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training.finite import nonfinite_parameters
        >>> layer = torch.nn.Linear(2, 1)
        >>> _ = torch.nn.init.constant_(layer.bias, float("nan"))
        >>> nonfinite_parameters({"policy": layer})
        ['policy/bias']
    """
    parameters = {
        name: value.detach()
        for key, item in objects.items()
        for name, value in _parameters(key, item)
        if value.is_floating_point() and value.numel()
    }
    found = []
    for device in {value.device for value in parameters.values()}:
        here = {name: value for name, value in parameters.items() if value.device == device}
        finite = torch.stack([value.isfinite().all() for value in here.values()]).tolist()
        found += [name for name, good in zip(here, finite, strict=True) if not good]
    return found


def _parameters(key: str, item: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(item, nn.Module):
        for name, value in item.named_parameters():
            yield f"{key}/{name}", value
    elif isinstance(item, Optimizer):
        for index, value in enumerate(value for group in item.param_groups for value in group["params"]):
            yield f"{key}/{index}", value
