"""The values of heads of any class: tried out on states of zeros, before the first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_lang.modules.actor import ACTION_VALUE, STATE_VALUE, UTTERANCE_VALUE, with_heads
from torchrl_lang.modules.trunk import HIDDEN, HIDDEN_PRE_NORM

__all__ = ["checked_values", "zero_states"]

_SHAPES = {ACTION_VALUE: "[N, n_q, V] or [N, V]", UTTERANCE_VALUE: "[N, n_q] or [N]", STATE_VALUE: "[N, 1] or [N]"}
_STATES = 3  # more than one, so that other orders of the axes show


def zero_states(keys: Iterable[NestedKey], width: int | None, modules: Iterable[nn.Module]) -> TensorDict | None:
    """States ``[3, H]`` of zeros in the dtype of ``modules``, the trunk first.

    None where the width or an entry is unknown, or weights are not here as a whole.
    """
    keys, weights = list(keys), [weight for module in modules for weight in module.parameters()]
    if width is None or not set(keys) <= {HIDDEN, HIDDEN_PRE_NORM}:
        return None
    if any(weight.is_meta or isinstance(weight, DTensor) for weight in weights):
        return None
    dtype = next((weight.dtype for weight in weights if weight.is_floating_point()), None)
    zeros = torch.zeros(_STATES, width, dtype=dtype, device=weights[0].device if weights else None)
    return TensorDict(dict.fromkeys(keys, zeros), batch_size=[_STATES])


def checked_values(head: str, kind: str, states: TensorDictBase, run: Callable[[], Tensor]) -> Tensor:
    """The values that ``run`` computes from states, with an axis of heads.

    Args:
        head: what the head is called in errors.
        kind: ``"action_value"``, ``"utterance_value"`` or ``"state_value"``.
        states: ``[N]``, what the head reads.
        run: applies the head to them.

    Raises:
        ValueError: the head fails, or writes another shape or numbers that are not floating-point.
    """
    try:
        found = run()
    except Exception as error:
        given = ", ".join(f"{key} {list(value.shape)} of {value.dtype}" for key, value in states.items())
        raise ValueError(
            f"{head} fails on states of this model, {given}, for which it must give {_SHAPES[kind]}. ({error})"
        ) from error
    shape, values = list(found.shape), with_heads(found, kind)
    axes, last = 3 if kind == ACTION_VALUE else 2, 1 if kind == STATE_VALUE else values.shape[-1]
    if values.ndim != axes or values.shape[0] != states.shape[0] or values.shape[-1] != last:
        raise ValueError(f"{head} must write {_SHAPES[kind]}, got {shape} for N = {states.shape[0]} states.")
    if not values.is_floating_point():
        raise ValueError(f"{head} must write floating-point numbers, got {values.dtype}.")
    return values
