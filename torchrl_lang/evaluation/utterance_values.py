"""Learned values of utterances: their ranks beside exact ones, preferences, and the advantages of texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchrl_lang._checks import Count, checked
from torchrl_lang.modules import ValueGuidance
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.decoding.model_runner import read_rows
from torchrl_lang.modules.head_values import ACTION_VALUE, apply_head
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.schema import AGENT_MASK, TOKENS, ControlTokens
from torchrl_lang.text import Tokenizer
from torchrl_lang.text.chat_tokenizer import decode_action


@torch.no_grad()
def last_values(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    rows: Sequence[Tensor],
    control: ControlTokens,
    *,
    count: int = 0,
    batch_size: int = 256,
) -> Tensor:
    """``min_k Q_k`` of the last ``count`` tokens of each row and of ending the utterance after them.

    Args:
        actor: trunk, head and distribution; Q reads its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``.
        rows: int64 ``[T_i]`` each, without padding, longer than ``count``.
        control: the control tokens of the rows.
        count: number of tokens before the end.
        batch_size: rows at a time.

    Returns:
        float ``[N, count + 1]``, on the CPU.
    """
    device, parts = next(actor.parameters()).device, []
    end = torch.tensor([control.end_of_action])
    with eval_mode(nn.ModuleList([actor, qvalue])):
        for first in range(0, len(rows), batch_size):
            chosen = rows[first : first + batch_size]
            tokens = pad_sequence(list(chosen), batch_first=True, padding_value=control.pad).to(device)
            length = torch.tensor([len(row) for row in chosen], device=device)
            attention = torch.arange(tokens.shape[1], device=device) < length[:, None]
            states = read_rows(split_actor(actor).trunk, tokens, attention, None)
            place = length[:, None] - 1 - torch.arange(count, -1, -1, device=device)
            number = torch.arange(len(chosen), device=device)[:, None]
            before = {key: state[number, place].flatten(0, 1) for key, state in states.items()}
            taken = torch.stack([torch.cat([row[len(row) - count :].cpu(), end]) for row in chosen]).to(device)
            q = apply_head(qvalue, before, ACTION_VALUE).amin(-2).gather(-1, taken.reshape(-1, 1))
            parts.append(q.reshape(taken.shape).cpu())
    return torch.cat(parts)


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
    batch_size: int = 256,
) -> float:
    """Mean over states of Spearman's rank correlation of learned and exact values of whole utterances.

    The learned value of an utterance is ``min_k Q_k`` of its end. States whose exact values are all equal do not count.

    Args:
        actor: trunk, head and distribution; Q reads its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``.
        known: the states.
        control: the control tokens of the rows.
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
    counted = [state for state in known if state.values.unique().numel() > 1]
    if not counted:
        return float("nan")
    rows = [torch.cat([state.tokens, utterance]) for state in counted for utterance in state.utterances]
    values = last_values(actor, qvalue, rows, control, batch_size=batch_size).squeeze(-1)
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
        raise ValueError(f"Compare utterances of one length, got {len(comparisons)} pairs of {sorted(lengths)}.")
    length = lengths.pop()
    better, worse = (
        last_values(actor, qvalue, rows, control, count=length, batch_size=batch_size)
        for rows in ([torch.cat(one[:2]) for one in comparisons], [torch.cat(one[::2]) for one in comparisons])
    )
    return ((better > worse).double() + (better >= worse).double()).mean(0) / 2


@dataclass(frozen=True)
class TextAdvantage:
    """A text of the agent and its learned advantage."""

    text: str
    advantage: float
    """Mean over its occurrences of the sum of ``min_k Q_k - V`` over its tokens."""
    count: int
    """Number of occurrences."""


@torch.no_grad()
def row_advantages(
    actor: ProbabilisticTensorDictSequential, qvalue: nn.Module, value: nn.Module, rows: TensorDictBase
) -> Tensor:
    """The learned advantage ``min_k Q_k(s, a) - V(s)`` of every token of the agent.

    Args:
        actor: trunk, head and distribution; Q and V read its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``.
        value: a head or module that writes ``state_value`` ``[N, 1]``.
        rows: the entries of a row, ``[*B, T]``.

    Returns:
        float ``[*B, T]``, zero on tokens that the agent did not write.
    """
    batch, scorer = DecisionBatch.read(rows), RowScorer(actor)
    if batch.empty:
        return batch.zeros()
    with eval_mode(nn.ModuleList([actor, qvalue, value])):
        states = {key: state.flatten(0, 1)[batch.place] for key, state in scorer.states(batch).items()}
        advantage = ValueGuidance(qvalue, value, beta=1.0).advantage(states, batch.action[:, None])
        return batch.at_tokens(advantage.squeeze(-1).float())


@checked
def text_advantages(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    value: nn.Module,
    rows: TensorDictBase,
    tokenizer: Tokenizer,
    *,
    ngram: Count | None = None,
    min_count: int = 1,
    batch_size: int = 256,
) -> list[TextAdvantage]:
    """Rank the agent's texts in a dataset by their learned advantage, the highest first.

    As in the ILQL paper's evaluation, the end-of-action token does not count.

    Args:
        actor: trunk, head and distribution; Q and V read its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``.
        value: a head or module that writes ``state_value`` ``[N, 1]``.
        rows: the entries of a row, ``[N, T]``.
        tokenizer: decodes the texts.
        ngram: rank all sequences of this number of tokens inside utterances; by default whole utterances.
        min_count: leave out texts that occur less often.
        batch_size: rows at a time.

    Examples:
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.evaluation import text_advantages
        >>> from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(w, reward=0.0)], True) for w in ("abc", "c", "abc")], tokenizer, 8)
        >>> actor = language_actor(causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=8))
        >>> heads = QValueHead(8, tokenizer.vocab_size), ValueHead(8)
        >>> sorted((found.text, found.count) for found in text_advantages(actor, *heads, rows, tokenizer))
        [('abc', 2), ('c', 1)]
        >>> sorted(found.text for found in text_advantages(actor, *heads, rows, tokenizer, ngram=2))
        ['ab', 'bc']
    """
    sums: defaultdict[tuple[int, ...], float] = defaultdict(float)
    counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for part in rows.split(batch_size):
        for tokens, advantage in _utterances(row_advantages(actor, qvalue, value, part), part, tokenizer):
            width = len(tokens) if ngram is None else ngram
            for start in range(len(tokens) - width + 1):
                text = tokens[start : start + width]
                sums[text] += sum(advantage[start : start + width])
                counts[text] += 1
    kept = [(list(text), sums[text] / count, count) for text, count in counts.items() if count >= min_count]
    found = [TextAdvantage(decode_action(tokenizer, text), mean, count) for text, mean, count in kept]
    return sorted(found, key=lambda one: (-one.advantage, one.text))


def _utterances(
    advantage: Tensor, rows: TensorDictBase, tokenizer: Tokenizer
) -> Iterator[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Tokens and advantages of each utterance, without its end."""
    end, pad = tokenizer.control.end_of_action, tokenizer.control.pad
    tokens = torch.where(rows.get(AGENT_MASK), rows.get(TOKENS).long(), pad)[:, : advantage.shape[-1]].tolist()
    for row in zip(tokens, advantage.tolist(), strict=True):
        for is_text, pairs in groupby(zip(*row, strict=True), key=lambda pair: pair[0] not in (end, pad)):
            if is_text:
                ids, values = zip(*pairs, strict=True)
                yield ids, values
