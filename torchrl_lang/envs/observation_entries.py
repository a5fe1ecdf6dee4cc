"""Read and check the inputs of ``reset`` and ``step``: named entries, rows, actions and masks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from torchrl_lang.schema import ACTION, ROW_KEYS, missing_entry

__all__ = [
    "checked_seed",
    "fresh_rows",
    "given_action",
    "in_vocabulary",
    "merge_rows",
    "named_entry",
    "reset_mask",
    "reset_options",
    "active_rows",
]


def checked_seed(seed: Any) -> int:
    """Convert a seed to an integer.

    Raises:
        TypeError: it is not an integer.
        ValueError: it has more than 64 bits.
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"A seed must be an integer or None, got {seed!r}.")
    number = operator.index(seed)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"A seed must have at most 64 bits, got {number}.")
    return number


def merge_rows(
    env: EnvBase, tensordict: TensorDictBase | None, keywords: Mapping[str, Any], *, set_state: bool
) -> tuple[TensorDictBase | None, dict[str, Any]]:
    """Move rows passed to ``reset`` by keyword into its tensordict; returns it and the other keywords.

    Raises:
        TypeError: rows are passed by keyword without ``set_state=True``.
        KeyError: with ``set_state=True`` an entry of the rows is missing.
    """
    others = {key: value for key, value in keywords.items() if key not in ROW_KEYS}
    rows = {key: value for key, value in keywords.items() if key in ROW_KEYS}
    if rows and not set_state:
        raise TypeError(
            f"{type(env).__name__}.reset() got the rows {list(rows)} by keyword without set_state=True: add it to "
            f"continue from these rows, or omit them to begin new episodes."
        )
    if rows:
        given = {key: torch.as_tensor(value, device=env.device) for key, value in rows.items()}
        tensordict = TensorDict({}, env.batch_size, device=env.device) if tensordict is None else tensordict.copy()
        tensordict.update(given)
    missing = [key for key in ROW_KEYS if tensordict is None or key not in tensordict.keys()]
    if set_state and missing:
        raise missing_entry(
            f"{type(env).__name__}.reset(set_state=True)",
            missing,
            [] if tensordict is None else tensordict,
            "TransformedEnv removes such entries from the tensordict: with transforms pass them by keyword, "
            f"reset(set_state=True, **rows.select{ROW_KEYS}).",
        )
    return tensordict, others


def reset_options(
    env: EnvBase, tensordict: TensorDictBase | None, named: Mapping[str, Any], known: Sequence[str]
) -> TensorDictBase | None:
    """The flattened (``[N]``) tensordict of ``reset``, with the entries that were passed as keywords.

    Raises:
        TypeError: a keyword is not ``known``.
        ValueError: an entry has another dtype or shape.
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
        options.set(key, _checked(env, key, torch.as_tensor(value, device=env.device), env.batch_size))
    return options


def named_entry(env: EnvBase, options: TensorDictBase | None, key: str) -> Tensor | None:
    """An entry of :func:`reset_options`, int64 ``[N]``, or None if it was not given."""
    value = None if options is None else options.get(key, None)
    return None if value is None else _checked(env, key, value, torch.Size([env.batch_size.numel()]))


def _checked(env: EnvBase, key: str, value: Tensor, batch: torch.Size) -> Tensor:
    if value.shape not in (batch, (*batch, 1)) or value.dtype != torch.int64:
        raise ValueError(
            f"'{key}' must be int64 of shape {tuple(env.batch_size)}, one number per row, got {value.dtype} of shape "
            f"{tuple(value.shape)}."
        )
    return value.reshape(-1)


def reset_mask(env: EnvBase, tensordict: TensorDictBase | None) -> Tensor | None:
    """The rows that a ``"_reset"`` mask resets, bool ``[N]``; None without a mask.

    Raises:
        ValueError: the mask has another dtype or shape.
    """
    mask = None if tensordict is None else tensordict.get("_reset", None)
    return None if mask is None else _checked_mask("_reset", mask, env.batch_size.numel())


def fresh_rows(env: EnvBase, tensordict: TensorDictBase | None, *, first: bool) -> Tensor:
    """The rows that a reset begins, bool ``[N]``: all, or those of a ``"_reset"`` mask.

    Raises:
        RuntimeError: the environment's ``first`` reset does not reset all rows.
    """
    fresh = reset_mask(env, tensordict)
    if fresh is None:
        return torch.ones(env.batch_size.numel(), dtype=torch.bool, device=env.device)
    if first and not fresh.all():
        raise RuntimeError(
            f"The first reset of {type(env).__name__} must reset every row, got a partial '_reset' mask: call reset() "
            f"once without it."
        )
    return fresh


def active_rows(live: Tensor, tensordict: TensorDictBase) -> Tensor:
    """The live rows, bool ``[N]``, that a step advances: all but those that a ``"_step"`` mask excludes.

    Raises:
        ValueError: the mask has another dtype or shape.
    """
    mask = tensordict.get("_step", None)
    return live if mask is None else live & _checked_mask("_step", mask, live.shape[0])


def _checked_mask(key: str, mask: Tensor, n: int) -> Tensor:
    """A mask over rows as bool ``[N]``, from one flag per row.

    Raises:
        ValueError: it has another dtype or shape.
    """
    if mask.dtype != torch.bool or mask.numel() != n:
        raise ValueError(
            f"'{key}' must be bool with one flag for each of the {n} rows, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}."
        )
    return mask.reshape(n)


def given_action(env: EnvBase, tensordict: TensorDictBase) -> Tensor:
    """The entry ``action``, not checked.

    Raises:
        KeyError: there is no ``action``.
    """
    action = tensordict.get(ACTION, None)
    if action is None:
        raise missing_entry(
            f"{type(env).__name__}.step()", [ACTION], tensordict, "Let a policy write it, or env.rand_action()."
        )
    return action


def in_vocabulary(action: Tensor, vocab_size: int, pad: int) -> Tensor:
    """The action with padding instead of ids outside the vocabulary.

    Raising an error would synchronize with the device at every step.
    """
    return torch.where((action >= 0) & (action < vocab_size), action, pad)
