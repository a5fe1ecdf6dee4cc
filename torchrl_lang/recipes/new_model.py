"""Language models from scratch, with the initialization that suits their width."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from torchrl_lang.modules import causal_lm

__all__ = ["new_lm"]


def new_lm(kind: str = "gpt2", *, width: int, **config: Any) -> PreTrainedModel:
    """A :func:`~torchrl_lang.modules.causal_lm` whose initial weights have a standard deviation of ``width ** -0.5``.

    Hugging Face's 0.02 is meant for widths near a thousand; in a narrow model it makes activations vanish.
    """
    return causal_lm(kind, width=width, initializer_range=width**-0.5, **config)
