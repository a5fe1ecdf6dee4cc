"""What ``reset`` and ``step`` are given: named entries, actions and masks, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang.schema import ACTION

__all__ = ["given_action", "named_entry", "reset_options", "stepped"]


def reset_options(
    env: EnvBase, tensordict: TensorDictBase | None, named: Mapping[str, Any], known: Sequence[str]
) -> TensorDictBase | None:
    """The flattened (``[N]``) tensordict that ``reset`` was given, with the entries that came as keywords in it.

    Raises:
        TypeError: a keyword is not ``known``.
        ValueError: a named entry has another dtype or shape.
    """
    unknown = sorted(named.keys() - {*known})
    if unknown:
        entries = f"the entries {list(known)} by name" if known else "no entries by name"
        raise TypeError(f"{type(env).__name__}.reset() got {unknown}, it takes {entries} (and set_state).")
    n = env.batch_size.numel()
    options = None if tensordict is None else tensordict.reshape(n)
    if not named:
        return options
    options = TensorDict({}, batch_size=[n], device=env.device) if options is None else options.copy()
    for key, value in named.items():
        options.set(key, _checked(env, key, torch.as_tensor(value, device=env.device)))
    return options


def named_entry(env: EnvBase, options: TensorDictBase | None, key: str) -> Tensor | None:
    """An entry of :func:`reset_options`, int64 ``[N]``, or None where it was not given."""
    value = None if options is None else options.get(key, None)
    return None if value is None else _checked(env, key, value)


def _checked(env: EnvBase, key: str, value: Tensor) -> Tensor:
    n = env.batch_size.numel()
    if value.numel() != n or value.dtype != torch.int64:
        raise ValueError(
            f"'{key}' must be int64 of shape {tuple(env.batch_size)}, one number a row, got {value.dtype} of shape "
            f"{tuple(value.shape)}."
        )
    return value.reshape(n)


def given_action(env: EnvBase, tensordict: TensorDictBase, vocab_size: int, pad: int) -> Tensor:
    """The entry ``action``, unchecked, with padding in the place of ids outside the vocabulary.

    Values are not looked at, so a step never waits for the device.

    Raises:
        KeyError: there is no ``action``.
    """
    action = tensordict.get(ACTION, None)
    if action is None:
        raise KeyError(
            f"{type(env).__name__}.step() needs an 'action', got {sorted(map(str, tensordict.keys()))}: let a policy "
            f"write it, or env.rand_action()."
        )
    return torch.where((action >= 0) & (action < vocab_size), action, pad)


def stepped(live: Tensor, tensordict: TensorDictBase) -> Tensor:
    """The live rows, bool ``[N]``, that a step is to advance: all but those that a ``"_step"`` mask leaves out."""
    mask = tensordict.get("_step", None)
    return live if mask is None else live & mask.reshape(live.shape)
