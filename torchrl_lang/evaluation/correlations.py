"""Correlation coefficients."""

from __future__ import annotations

from torch import Tensor

__all__ = ["correlation", "rank_correlation"]


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of ``[N]`` numbers each; NaN if one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = (a.square().sum() * b.square().sum()).sqrt()
    return float((a * b).sum() / scale) if float(scale) > 0 else float("nan")


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation, of the ranks; equal values share the mean of their ranks. NaN if one is constant."""
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Tensor) -> Tensor:
    """The rank of each value from 0, float64 ``[N]``."""
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0).double() - (count + 1) / 2)[place]
