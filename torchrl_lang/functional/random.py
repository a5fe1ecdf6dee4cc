"""Counter-based random numbers, which do not depend on the batch in which they are drawn."""

from __future__ import annotations

from torch import Tensor

from torchrl_lang.functional.precision import scalar_like

# The constants of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), as int64.
_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts signed integers arithmetically; the mask clears the copies of the sign bit.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_index(seed: Tensor | int, counter: Tensor, n: Tensor | int) -> Tensor:
    """A uniform integer in ``[0, n)`` for each counter, from a hash of seed and counter.

    Unlike the numbers of a generator, the result does not depend on earlier draws: episode 17 of a seed is the same in
    a batch of 1 and in a batch of 4,096. Drawing does not synchronize with the device.

    Args:
        seed: int64 scalar or anything that broadcasts against ``counter``.
        counter: int64, any shape: the index of the draw.
        n: number of outcomes, an integer or int64 of the shape of ``counter``, at most ``2**31`` (the bias of the
            remainder is below ``n / 2**63``).

    Returns:
        int64 of the shape of ``counter``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.random import random_index
        >>> all_four = random_index(0, torch.arange(4), 1000)
        >>> bool((random_index(0, torch.tensor([2]), 1000) == all_four[2]).all())
        True
    """
    counter = counter.long()
    x = _mix(_mix(scalar_like(seed, counter) + _GOLDEN) + counter * _GOLDEN)
    return _shift_right(x, 1) % n


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)
