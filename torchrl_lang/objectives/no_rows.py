"""A batch without rows, such as a collector's in which no episode ended: losses of zero, with gradients of zero."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase

__all__ = ["blank_row", "for_any_number"]

Forward = Callable[[Any, TensorDictBase], TensorDictBase]


def for_any_number(forward: Forward) -> Forward:
    """Let the ``forward`` of a loss over rows take a batch without rows, by way of a row without an action."""

    @functools.wraps(forward)
    def wrapper(self: Any, tensordict: TensorDictBase) -> TensorDictBase:
        tokens = tensordict.get(self.tensor_keys.tokens, None)
        if tokens is None or tokens.numel():
            return forward(self, tensordict)
        out = forward(self, blank_row(tensordict, self.tensor_keys.tokens, self.tensor_keys.attention_mask))
        if self.reduction == "none":
            for key in [key for key in out.keys() if key.startswith("loss_")]:
                out.set(key, out.get(key)[:0].reshape(tokens.shape))
        return out

    return wrapper


def blank_row(tensordict: TensorDictBase, tokens_key: NestedKey, attention_key: NestedKey) -> TensorDict:
    """One row ``[1]`` with the entries of a batch without rows: a single real token, and nothing that counts."""
    batch = tensordict.get(tokens_key).shape[:-1]
    row = TensorDict(batch_size=[1], device=tensordict.device)
    for key, value in tensordict.items(True, True):
        if value.shape[: len(batch)] == batch:
            row.set(key, value.new_zeros((1, *value.shape[len(batch) :])))
    tokens = row.get(tokens_key)
    first = torch.arange(tokens.shape[-1], device=tokens.device) == 0
    return row.set(attention_key, first[None])
