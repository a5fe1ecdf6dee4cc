"""Compare the order of learned values with that of exact values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from torchrl_lang.modules import ACTION_VALUE, split_actor
from torchrl_lang.modules.decoding.model_runner import apply_head, read_rows
from torchrl_lang.modules.eval_mode import eval_mode
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


@torch.no_grad()
def rank_accuracy(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    known: Sequence[KnownValues],
    control: ControlTokens,
) -> float:
    """Mean over states of Spearman's rank correlation of learned and exact values of whole utterances.

    The learned value of an utterance is ``min_k Q_k`` of its end. States whose exact values are all equal do not count.

    Args:
        actor: trunk, head and distribution; Q reads its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``.
        known: the states.
        control: the control tokens of the rows.

    Returns:
        1 if all orders agree, 0 for values without information, NaN if no state counts.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import CharTokenizer
        >>> from torchrl_lang.evaluation import KnownValues, rank_accuracy
        >>> from torchrl_lang.modules import QValueHead, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=6)
        >>> a, b, c = tokenizer.encode("abc")
        >>> state = KnownValues(torch.tensor([tokenizer.control.begin_action]), torch.tensor([[a], [b], [c]]),
        ...                     torch.tensor([0.0, 1.0, 2.0]))
        >>> qvalue = QValueHead(8, tokenizer.vocab_size)
        >>> -1 <= rank_accuracy(language_actor(lm), qvalue, [state], tokenizer.control) <= 1
        True
    """
    trunk = split_actor(actor).trunk
    found = []
    with eval_mode(nn.ModuleList([actor, qvalue])):
        for state in known:
            if state.values.unique().numel() < 2:
                continue
            before = state.tokens.expand(len(state.utterances), -1)
            tokens = torch.cat([before, state.utterances], -1).to(next(actor.parameters()).device)
            states = read_rows(trunk, tokens, torch.ones_like(tokens, dtype=torch.bool))
            last = {key: value[:, -1] for key, value in states.items()}
            learned = apply_head(qvalue, last, ACTION_VALUE).amin(-2)[:, control.end_of_action]
            found.append(_spearman(learned.cpu(), state.values))
    return sum(found) / len(found) if found else float("nan")


def _spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation; 0 if all of one are equal."""
    a, b = (ranks - ranks.mean() for ranks in (_ranks(a), _ranks(b)))
    scale = (a.square().sum() * b.square().sum()).sqrt()
    return float((a * b).sum() / scale) if float(scale) > 0 else 0.0


def _ranks(values: Tensor) -> Tensor:
    """The rank of each value from 0, float64 ``[C]``; equal values share the mean of their ranks."""
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0).double() - (count + 1) / 2)[place]
