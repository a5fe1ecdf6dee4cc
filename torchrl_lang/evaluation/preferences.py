"""Whether learned values prefer one utterance to another in the same state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchrl_lang.modules import ACTION_VALUE, split_actor
from torchrl_lang.modules.decoding.model_runner import apply_head, read_rows
from torchrl_lang.modules.eval_mode import eval_mode
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


@torch.no_grad()
def preference_rates(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    comparisons: Sequence[Comparison],
    control: ControlTokens,
    *,
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
        batch_size: comparisons at a time.

    Returns:
        float64 ``[L + 1]``: a rate for each token, and last the one at the end of the utterance.

    Raises:
        ValueError: there is no comparison, or the lengths differ.

    Examples:
        >>> import torch
        >>> from torchrl_lang.data import CharTokenizer
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
    device = next(actor.parameters()).device
    parts = []
    with eval_mode(nn.ModuleList([actor, qvalue])):
        for first in range(0, len(comparisons), batch_size):
            chosen = comparisons[first : first + batch_size]
            better = _values(actor, qvalue, [(c.tokens, c.better) for c in chosen], control, device)
            worse = _values(actor, qvalue, [(c.tokens, c.worse) for c in chosen], control, device)
            parts.append(((better > worse).double() + (better >= worse).double()) / 2)
    return torch.cat(parts).mean(0).cpu()


def _values(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    rows: Sequence[tuple[Tensor, Tensor]],
    control: ControlTokens,
    device: torch.device,
) -> Tensor:
    """``min_k Q_k`` along each utterance and at its end, ``[N, L + 1]``."""
    tokens = pad_sequence([torch.cat(pair) for pair in rows], batch_first=True, padding_value=control.pad).to(device)
    length = torch.tensor([len(state) for state, _ in rows], device=device)
    wide = rows[0][1].shape[0]
    attention_mask = torch.arange(tokens.shape[1], device=device) < (length + wide)[:, None]
    states = read_rows(split_actor(actor).trunk, tokens, attention_mask)
    place = length[:, None] - 1 + torch.arange(wide + 1, device=device)
    number = torch.arange(len(rows), device=device)[:, None]
    chosen = {key: value[number, place].flatten(0, 1) for key, value in states.items()}
    end = torch.full((1,), control.end_of_action, device=device)
    taken = torch.stack([torch.cat([utterance.to(device), end]) for _, utterance in rows])
    table = apply_head(qvalue, chosen, ACTION_VALUE).amin(-2)
    return table.gather(-1, taken.reshape(-1, 1)).reshape(taken.shape)
