"""The texts that learned values find most and least advantageous: utterances, and sequences of tokens in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from torchrl_lang._checks import positive
from torchrl_lang.modules import ValueGuidance
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.schema import AGENT_MASK, TOKENS
from torchrl_lang.text import Tokenizer
from torchrl_lang.text.chat_tokenizer import decode_action

__all__ = ["TextAdvantage", "row_advantages", "text_advantages"]


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


def text_advantages(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    value: nn.Module,
    rows: TensorDictBase,
    tokenizer: Tokenizer,
    *,
    ngram: int | None = None,
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
    if ngram is not None:
        positive("ngram", ngram)
    sums: defaultdict[tuple[int, ...], float] = defaultdict(float)
    counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for part in rows.split(batch_size):
        for tokens, advantage in _utterances(row_advantages(actor, qvalue, value, part), part, tokenizer):
            width = len(tokens) if ngram is None else ngram
            for start in range(len(tokens) - width + 1):
                text = tokens[start : start + width]
                sums[text] += sum(advantage[start : start + width])
                counts[text] += 1
    found = [
        TextAdvantage(decode_action(tokenizer, list(text)), sums[text] / count, count)
        for text, count in counts.items()
        if count >= min_count
    ]
    return sorted(found, key=lambda one: (-one.advantage, one.text))


def _utterances(
    advantage: Tensor, rows: TensorDictBase, tokenizer: Tokenizer
) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """Tokens and advantages of each utterance, without its end."""
    end, pad = tokenizer.control.end_of_action, tokenizer.control.pad
    width = advantage.shape[-1]
    tokens = torch.where(rows.get(AGENT_MASK), rows.get(TOKENS).long(), pad)[:, :width].tolist()
    for ids, values in zip(tokens, advantage.tolist(), strict=True):
        start = 0
        for place in range(len(ids) + 1):
            if place == len(ids) or ids[place] in (end, pad):
                if place > start:
                    yield tuple(ids[start:place]), values[start:place]
                start = place + 1
