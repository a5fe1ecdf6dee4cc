"""Filters of next-token logits: temperature, top-k, top-p and min-p. A removed token has logit ``-inf``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_lang._checks import check_given, check_options


def top_k_filter(logits: Tensor, k: int) -> Tensor:
    """Keep the ``k`` most likely tokens and ties with the last of them."""
    if k >= logits.shape[-1]:
        return logits
    threshold = logits.topk(k, -1).values[..., -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def top_p_filter(logits: Tensor, p: float) -> Tensor:
    """Keep the most likely tokens until their probability exceeds ``p``, including the token that exceeds it and ties.

    Nucleus sampling (arXiv 1904.09751).
    """
    if p == 1:  # rounding may raise the cumulative sum above 1 before the last token
        return logits
    ordered = logits.sort(-1, descending=True).values
    before = (ordered.softmax(-1).cumsum(-1) <= p).sum(-1, keepdim=True)
    threshold = ordered.gather(-1, before.clamp_max(logits.shape[-1] - 1))
    return logits.masked_fill(logits < threshold, -torch.inf)


def min_p_filter(logits: Tensor, p: float) -> Tensor:
    """Keep tokens whose probability is at least ``p`` times that of the most likely token.

    Min-p sampling (arXiv 2407.01082). Before values are added it is the threshold of discrete BCQ (arXiv 1910.01708,
    eq. 2), which keeps a policy to actions that its data support.
    """
    threshold = logits.amax(-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < threshold, -torch.inf)


def filtered(values: Tensor, logits: Tensor, threshold: float) -> Tensor:
    """The values, ``-inf`` at tokens that are impossible, or less likely than ``threshold`` times the most likely one.

    A threshold of 0 keeps all possible tokens. Both ``[..., V]``.
    """
    kept = min_p_filter(logits, threshold) if threshold else logits
    return values.masked_fill(kept.isneginf(), -torch.inf)


def filter_logits(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Divide by the temperature, then apply top-k, top-p and min-p; the input is not modified.

    Args:
        logits: float ``[*B, V]``.
        temperature: above zero; use greedy decoding for the limit at zero.
        top_k: number of tokens to keep.
        top_p: probability to keep.
        min_p: least probability to keep, relative to that of the most likely token.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import filter_logits
        >>> filter_logits(torch.tensor([2.0, 1.0, 0.0]), temperature=0.5, top_k=2)
        tensor([4., 2., -inf])
    """
    unit = "(0, 1]"
    check_options(temperature=(temperature, "(0, inf)"))
    check_given(top_k=(top_k, 1), top_p=(top_p, unit), min_p=(min_p, unit))
    if temperature != 1.0:
        logits = logits / temperature
    if top_k is not None:
        logits = top_k_filter(logits, top_k)
    if top_p is not None:
        logits = top_p_filter(logits, top_p)
    if min_p is not None:
        logits = min_p_filter(logits, min_p)
    return logits
