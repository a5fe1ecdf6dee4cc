"""Compare the order of learned values with that of exact values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from torchrl_lang.evaluation.last_values import last_values
from torchrl_lang.schema import ControlTokens

__all__ = ["KnownValues", "rank_accuracy"]


class KnownValues(NamedTuple):
    """A state in which the values of some utterances are known."""

    tokens: Tensor
    """int64 ``[T]``, the row before the utterance, without padding."""
    utterances: Tensor
    """int64 ``[C, L]``, the utterances without their end."""
    values: Tensor
    """float ``[C]``, the expected returns."""


def rank_accuracy(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    known: Sequence[KnownValues],
    control: ControlTokens,
    *,
    features: TensorDictBase | None = None,
    batch_size: int = 256,
) -> float:
    """Mean over states of Spearman's rank correlation of learned and exact values of whole utterances.

    The learned value of an utterance is ``min_k Q_k`` of its end. States whose exact values are all equal do not count.

    Args:
        actor: trunk, head and distribution; Q reads its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``.
        known: the states.
        control: the control tokens of the rows.
        features: ``features`` and, where some are masked, ``features_mask`` of each state, for a trunk that reads them.
        batch_size: utterances at a time.

    Returns:
        1 if all orders agree, 0 for values without information, NaN if no state counts.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer
        >>> from torchrl_lang.evaluation import KnownValues, rank_accuracy
        >>> from torchrl_lang.modules import QValueHead, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("ab")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=6)
        >>> actor, qvalue = language_actor(lm), QValueHead(8, tokenizer.vocab_size)
        >>> state = torch.tensor([tokenizer.control.begin_action])
        >>> utterances, exact = torch.tensor([[token] for token in tokenizer.encode("ab")]), torch.tensor([0.0, 1.0])
        >>> known = [KnownValues(state, utterances, values) for values in (exact, -exact)]  # one order and the other
        >>> sorted(round(rank_accuracy(actor, qvalue, [one], tokenizer.control)) for one in known)
        [-1, 1]
    """
    places = [place for place, state in enumerate(known) if state.values.unique().numel() > 1]
    counted = [known[place] for place in places]
    if not counted:
        return float("nan")
    if features is not None:  # one row for each utterance
        features = features[torch.tensor(places).repeat_interleave(torch.tensor([len(one.values) for one in counted]))]
    rows = [torch.cat([state.tokens, utterance]) for state in counted for utterance in state.utterances]
    values = last_values(actor, qvalue, rows, control, features=features, batch_size=batch_size).squeeze(-1)
    learned = values.split([len(state.values) for state in counted])
    found = [rank_correlation(ours, state.values) for ours, state in zip(learned, counted, strict=True)]
    # Values that are equal for all utterances have no order, so they count as 0.
    return float(torch.tensor(found).nan_to_num(0.0).mean())


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's correlation, of the ranks; equal values share the mean of their ranks. NaN if one is constant."""
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """The rank of each value from 0, float64 ``[N]``."""
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0).double() - (count + 1) / 2)[place]
