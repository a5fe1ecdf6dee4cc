"""Whether learned values prefer one utterance to another in the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from torchrl_lang.evaluation.value_report import last_values
from torchrl_lang.schema import ControlTokens

__all__ = ["Comparison", "preference_rates"]


class Comparison(NamedTuple):
    """Two utterances in the same state, of which the first is better."""

    tokens: Tensor
    """int64 ``[T]``, the row before the utterance, without padding."""
    better: Tensor
    """int64 ``[L]``, an utterance without its end."""
    worse: Tensor
    """int64 ``[L]``, an utterance of the same length."""


def preference_rates(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    comparisons: Sequence[Comparison],
    control: ControlTokens,
    *,
    features: TensorDictBase | None = None,
    batch_size: int = 256,
) -> Tensor:
    """How often Q is higher along the better utterance, at each of its tokens and at its end.

    This is the "Q rank" of the ILQL paper's experiment on branched games (arXiv 2206.11871, sec. 6.1). At token ``i``
    the two values are ``min_k Q_k`` of the i-th token after its own beginning; equal values count as one half, for
    example where the beginnings are equal.

    Args:
        actor: trunk, head and distribution; Q reads its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``, online or target.
        comparisons: all with utterances of the same length ``L``.
        control: the control tokens of the rows.
        features: ``features`` and, where some are masked, ``features_mask`` of the comparisons, for a trunk with
        features.
        batch_size: comparisons at a time.

    Returns:
        float64 ``[L + 1]``: a rate for each token, and last the one at the end of the utterance.

    Raises:
        ValueError: there is no comparison, or the lengths differ.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.evaluation import Comparison, preference_rates
        >>> from torchrl_lang.modules import QValueHead, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=8)
        >>> state, ab, ac = (torch.tensor(tokenizer.encode(text)) for text in ("b", "ab", "ac"))
        >>> actor, qvalue = language_actor(lm), QValueHead(8, tokenizer.vocab_size)
        >>> rates = preference_rates(actor, qvalue, [Comparison(state, ab, ac)], tokenizer.control)
        >>> rates.shape, float(rates[0])  # both begin with "a"
        (torch.Size([3]), 0.5)
    """
    lengths = {len(utterance) for _, better, worse in comparisons for utterance in (better, worse)}
    if len(lengths) != 1:
        raise ValueError(
            f"Compare utterances of one length, at least one pair, got {len(comparisons)} pairs of lengths "
            f"{sorted(lengths)}."
        )
    length = lengths.pop()
    better, worse = (
        last_values(actor, qvalue, rows, control, count=length, features=features, batch_size=batch_size)
        for rows in ([torch.cat(one[:2]) for one in comparisons], [torch.cat(one[::2]) for one in comparisons])
    )
    return ((better > worse).double() + (better >= worse).double()).mean(0) / 2
