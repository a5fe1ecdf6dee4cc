"""Damage to the entries of a dataset that keeps every file's length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from tests.campaigns.mutators.base import Mutator, named


def poke(dtype: str, *values: float) -> Callable[[Path, Random], str]:
    """A mutator that writes one of ``values`` over one item."""

    def apply(path: Path, random: Random) -> str:
        items = np.fromfile(path, dtype)
        where, value = random.randrange(len(items)), random.choice(values)
        old, items[where] = items[where], value
        items.tofile(path)
        return f"item {where}: {old} -> {items[where]}"

    return apply


def everywhere(dtype: str, change: Callable[[np.ndarray], np.ndarray], what: str) -> Callable[[Path, Random], str]:
    """A mutator of all items."""

    def apply(path: Path, random: Random) -> str:
        change(np.fromfile(path, dtype)).astype(dtype).tofile(path)
        return what

    return apply


def swap_items(path: Path, random: Random) -> str:
    items = np.fromfile(path, "u1" if "mask" in path.name or "ated" in path.name else "i4")
    i, j = random.sample(range(len(items)), 2)
    items[[i, j]] = items[[j, i]]
    items.tofile(path)
    return f"items {i} and {j} swapped"


TOKENS, REWARD, FLAGS = named("tokens.memmap"), named("reward.memmap"), named("mask.memmap", "ated.memmap")

ROWS = [
    Mutator("rows_token_poked", TOKENS, poke("i4", 0, 1, 2, 3, 4, 5)),
    Mutator("rows_token_out_of_range", TOKENS, poke("i4", -1, 35, 1000, 2**31 - 1, -(2**31))),
    Mutator("rows_tokens_zeroed", TOKENS, everywhere("i4", np.zeros_like, "all tokens 0")),
    Mutator("rows_reward_poked", REWARD, poke("f4", 1.0, -3.5, 1e30)),
    Mutator("rows_reward_not_finite", REWARD, poke("f4", np.nan, np.inf)),
    Mutator("rows_rewards_zeroed", REWARD, everywhere("f4", np.zeros_like, "all rewards 0")),
    Mutator("rows_rewards_negated", REWARD, everywhere("f4", np.negative, "all rewards negated")),
    Mutator("rows_flag_of_two", FLAGS, poke("u1", 2, 255, 128)),
    Mutator("rows_flags_inverted", FLAGS, everywhere("u1", lambda flags: 1 - flags, "all flags inverted")),
    Mutator("rows_items_swapped", named(".memmap"), swap_items),
]
