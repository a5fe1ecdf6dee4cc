"""Specs of the observations and actions of language environments."""

from __future__ import annotations

import torch
from torchrl.data import Binary, Categorical, TensorSpec, Unbounded

from torchrl_lang.schema import AGENT_MASK, ATTENTION_MASK, FEATURES, FEATURES_MASK, TOKEN_REWARD, TOKENS

__all__ = ["feature_specs", "flags", "row_specs", "token_ids"]


def flags(batch: torch.Size, n: int, device: torch.device | None) -> Binary:
    """``n`` flags per row: bool ``[*B, n]``."""
    return Binary(n=n, shape=(*batch, n), dtype=torch.bool, device=device)


def token_ids(vocab_size: int, batch: torch.Size, *shape: int, device: torch.device | None) -> Categorical:
    """Token ids, int64 ``[*B, *shape]``."""
    return Categorical(vocab_size, shape=(*batch, *shape), dtype=torch.int64, device=device)


def row_specs(vocab_size: int, batch: torch.Size, width: int, device: torch.device | None) -> dict[str, TensorSpec]:
    """The four entries of a row, ``[*B, T]``."""
    return {
        TOKENS: token_ids(vocab_size, batch, width, device=device),
        ATTENTION_MASK: flags(batch, width, device),
        AGENT_MASK: flags(batch, width, device),
        TOKEN_REWARD: Unbounded(shape=(*batch, width), dtype=torch.float32, device=device),
    }


def feature_specs(batch: torch.Size, size: tuple[int, int], device: torch.device | None) -> dict[str, TensorSpec]:
    """Specs of ``features`` ``[*B, P, F]`` and ``features_mask`` ``[*B, P]`` for a ``size`` of ``(P, F)``."""
    return {
        FEATURES: Unbounded(shape=(*batch, *size), dtype=torch.float32, device=device),
        FEATURES_MASK: flags(batch, size[0], device),
    }
