"""The attention windows of a model's layers, and whether the model can decode with a cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["attention_windows", "cache_obstacle"]

FULL, SLIDING = "full_attention", "sliding_attention"
# These attention implementations take a float mask as it is; others build their own masks or need kernels per shape.
_MASKED = ("sdpa", "eager")


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The number of tokens, including itself, that a token attends to, by kind of layer; None for all tokens.

    Examples:
        >>> from transformers import AutoConfig
        >>> from torchrl_lang.modules.attention_windows import attention_windows
        >>> attention_windows(AutoConfig.for_model("mistral", sliding_window=128))
        {'sliding_attention': 128}
        >>> attention_windows(AutoConfig.for_model("gpt2"))
        {'full_attention': None}
    """
    window, limit = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    kinds = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING]
    if window is not None and limit is not None and window >= limit:
        window = None
    return {kind: window if kind == SLIDING else None for kind in sorted(set(kinds))}


def cache_obstacle(model: PreTrainedModel) -> str | None:
    """Why a model without its head cannot read rows incrementally with our masks, in words; None if it can."""
    config: Any = model.config
    others = sorted(set(attention_windows(config)) - {FULL, SLIDING})
    if others:
        return f"its layers are of the kinds {others}"
    if "local" in getattr(config, "attention_layers", ()):
        return "its local attention builds masks of its own"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values"
    if config._attn_implementation not in _MASKED:
        return (
            f"attn_implementation={config._attn_implementation!r} takes no mask over single keys: load the model with "
            "attn_implementation='sdpa'"
        )
    return None if _takes_positions(type(model).forward) else "it takes no position_ids"


@cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    return "position_ids" in signature(forward).parameters
