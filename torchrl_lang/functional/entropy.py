"""Entropy of a distribution over a vocabulary."""

from __future__ import annotations

from torch import Tensor

__all__ = ["categorical_entropy"]


def categorical_entropy(log_prob: Tensor) -> Tensor:
    """Entropy in nats of normalised distributions, with finite gradients if tokens have probability zero.

    Args:
        log_prob: float ``[*B, V]``, logarithms of probabilities that sum to one; may be ``-inf``.

    Returns:
        ``[*B]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import categorical_entropy
        >>> categorical_entropy(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]]).log())
        tensor([0.6931, 1.0397])
    """
    # Probabilities below the bound are zero in any precision; the bound avoids 0 * inf = NaN.
    return -(log_prob.exp() * log_prob.clamp_min(-1e4)).sum(-1)
