"""PEFT adapters: find them, list their weights, disable them temporarily."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang.modules.eval_mode import eval_mode
from torchrl_lang.modules.merging import is_adapter

__all__ = ["adapter_layers", "adapter_weights", "refuse_merged", "without_adapters"]


@contextmanager
def without_adapters(actor: nn.Module) -> Iterator[None]:
    """No adapters, evaluation mode, no gradients; on exit every module is as it was."""
    layers = adapter_layers(actor)
    refuse_merged(layers)
    layers = [layer for layer in layers if not layer.disable_adapters]
    # Switching off and on again also sets which adapters train.
    trains = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        with eval_mode(actor), torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in trains:
            parameter.requires_grad_(flag)


def adapter_layers(actor: nn.Module) -> list[Any]:
    """PEFT's layers in the actor."""
    return [module for module in actor.modules() if is_adapter(module)]


def adapter_weights(actor: nn.Module) -> Iterator[Tensor]:
    """The weights of the adapters."""
    for layer in adapter_layers(actor):
        for name in layer.adapter_layer_names:
            held = getattr(layer, name, None)
            if isinstance(held, nn.Module):
                yield from held.parameters()
                yield from held.buffers()
            elif isinstance(held, Tensor):
                yield held


def refuse_merged(layers: list[Any]) -> None:
    """Raise where adapters are merged into the base weights, and so cannot be switched off."""
    merged = [layer for layer in layers if layer.merged_adapters]
    if merged:
        raise ValueError(
            f"The adapters of {len(merged)} layers are merged into the base weights: call unmerge_adapter() on the "
            "PEFT model first, or use frozen_copy(actor, share=False)."
        )
