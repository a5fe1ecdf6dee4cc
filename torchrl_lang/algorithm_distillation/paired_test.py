"""A test of paired differences that needs no distribution of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_lang._checks import at_least_one

__all__ = ["PairedTest", "paired_test"]

_EXACT = 14
_BLOCK = 1 << 12


@dataclass(frozen=True)
class PairedTest:
    """Whether one of two paired figures is larger; see :func:`paired_test`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import paired_test
        >>> found = paired_test(torch.tensor([3.0, 2.0, 5.0]), torch.tensor([1.0, 1.0, 1.0]))
        >>> found.pairs, found.wins, found.p_value
        (3, 1.0, 0.125)
    """

    pairs: int
    difference: float
    """Mean difference."""
    wins: float
    """Share of the pairs with a positive difference."""
    p_value: float
    """One-sided: the probability of a mean difference at least as large if signs were random."""


def paired_test(larger: Tensor, smaller: Tensor, *, draws: int = 10_000, seed: int = 0) -> PairedTest:
    r"""Test by random signs whether ``larger`` is larger than ``smaller`` (Fisher's randomization test).

    If the pairs did not differ, each difference :math:`d_i` could as well have had the other sign. The p-value is the
    share of sign vectors :math:`s \in \{-1, 1\}^n` with :math:`\sum_i s_i d_i \ge \sum_i d_i`: of all :math:`2^n` up to
    14 pairs, otherwise of ``draws`` random ones and the observed one.

    Args:
        larger: float ``[n]``.
        smaller: float ``[n]``, of the same pairs.
        draws: number of random sign vectors.
        seed: of the random signs.

    Raises:
        ValueError: the figures are not two vectors of one length, or not finite.

    Examples:
        >>> import torch
        >>> from torchrl_lang.algorithm_distillation import paired_test
        >>> paired_test(torch.tensor([3.0, 2.0, 5.0]), torch.tensor([1.0, 1.0, 1.0]))
        PairedTest(pairs=3, difference=2.3333333333333335, wins=1.0, p_value=0.125)
    """
    at_least_one("draws", draws)
    if larger.ndim != 1 or larger.shape != smaller.shape or not len(larger):
        raise ValueError(
            f"A paired test needs two vectors of one length, got {list(larger.shape)} and {list(smaller.shape)}."
        )
    difference = (larger - smaller).double().cpu()
    if not difference.isfinite().all():
        raise ValueError("A paired test needs finite figures.")
    n = len(difference)
    is_exact = n <= _EXACT
    total = 1 << n if is_exact else draws
    generator = torch.Generator().manual_seed(seed)
    # Sums in another order differ in their last digits: an equal one must count.
    observed = difference.sum() - 1e-9 * difference.abs().sum()
    count = 0
    for first in range(0, total, _BLOCK):
        size = min(_BLOCK, total - first)
        if is_exact:
            flips = (torch.arange(first, first + size)[:, None] >> torch.arange(n)) & 1
        else:
            flips = torch.randint(2, (size, n), generator=generator)
        count += int(((1 - 2 * flips).double() @ difference >= observed).sum())
    p_value = count / total if is_exact else (count + 1) / (total + 1)
    return PairedTest(n, float(difference.mean()), float((difference > 0).double().mean()), p_value)
