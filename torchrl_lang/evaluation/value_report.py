"""Learned values beside returns and exact values: can they guide decoding?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from torchrl_lang.evaluation.utterance_values import KnownValues, rank_accuracy
from torchrl_lang.functional import decision_mask, shift_left, turn_end_mask, two_clock_advantages
from torchrl_lang.functional.decisions import row_length
from torchrl_lang.modules.head_values import ACTION_VALUE, STATE_VALUE, apply_head
from torchrl_lang.modules.hugging_face import eval_mode
from torchrl_lang.modules.row_scoring import DecisionBatch, RowScorer
from torchrl_lang.schema import TERMINATED, TOKEN_REWARD, ControlTokens, entry

READY_FIT = 0.5
"""Least share of the variance of its own targets that Q must explain."""

READY_UNTRIED = 0.03
"""Largest share of states in which Q may prefer an untried token."""

_UNTRIED = 0.01
"""A token with less probability under the language model is one that the data hardly ever has there."""


@dataclass(frozen=True)
class ValueReport:
    """Learned values beside the returns of held-out episodes, over the agent's tokens."""

    tokens: int
    """Number of the agent's tokens."""
    qvalue_correlation: float
    """Pearson correlation of ``min_k Q_k(s, a)`` of the taken tokens with the discounted rewards to go. It
    does not decide :attr:`ready`: where returns are mostly chance or cut off by a time limit, values that solve a task
    exactly may have a correlation around 0."""
    value_correlation: float
    """The same for ``V(s)``."""
    qvalue_fit: float
    """Share of the variance of the one-step targets ``r + gamma V(s')`` that Q explains, 1 at best: how far training
    has come."""
    qvalue_slope: float
    """Slope of the least-squares line of the returns over Q: 1 if differences of Q are differences of returns, below 1
    if Q exaggerates them."""
    qvalue_bias: float
    """Mean of Q minus the return. Above 0 is expected: Q estimates a better policy than the one that made the data."""
    untried_rate: float
    """Share of states in which Q prefers a token to which the language model gives less than 1 %."""
    rank_accuracy: float = math.nan
    """:func:`~torchrl_lang.evaluation.value_report` where exact values are known, otherwise NaN."""

    @property
    def ready(self) -> bool:
        """Whether large weights of the values (``beta`` above 1) can be expected to help."""
        return self.qvalue_fit >= READY_FIT and self.untried_rate <= READY_UNTRIED  # NaN counts as missing

    def as_dict(self) -> dict[str, Any]:
        """All numbers, whether the values are ready, and the sentence, for JSON; NaN becomes None."""
        numbers = {name: None if math.isnan(value) else value for name, value in asdict(self).items()}
        return numbers | {"ready": self.ready, "summary": str(self)}

    def scalars(self) -> dict[str, float]:
        """The numbers to log during training."""
        unknown = {"tokens", "rank_accuracy"} if math.isnan(self.rank_accuracy) else {"tokens"}
        return {name: value for name, value in asdict(self).items() if name not in unknown}

    def __str__(self) -> str:
        """One sentence for logs and tables.

        Examples:
            >>> from torchrl_lang.evaluation.value_report import ValueReport
            >>> print(ValueReport(900, 0.66, 0.63, 0.9, 1.4, 0.4, 0.0))
            values are ready: fit 0.90, 0 % untried tokens preferred, correlation 0.66 with held-out returns
            >>> print(ValueReport(900, 0.3, 0.2, 0.9, 1.3, 4.6, 0.33))
            values are not ready, 33 % untried tokens preferred (at most 3 %): use beta <= 1
        """
        fit, untried = f"fit {self.qvalue_fit:.2f}", f"{100 * self.untried_rate:.0f} % untried tokens preferred"
        reasons = [] if self.qvalue_fit >= READY_FIT else [f"{fit} (at least {READY_FIT})"]
        if not self.untried_rate <= READY_UNTRIED:
            reasons.append(f"{untried} (at most {100 * READY_UNTRIED:.0f} %)")
        if reasons:
            return f"values are not ready, {', '.join(reasons)}: use beta <= 1"
        correlation = f"correlation {self.qvalue_correlation:.2f} with held-out returns"
        order = "" if math.isnan(self.rank_accuracy) else f", rank accuracy {self.rank_accuracy:.2f}"
        return f"values are ready: {fit}, {untried}, {correlation}{order}"


@torch.no_grad()
def value_report(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    value: nn.Module,
    rows: TensorDictBase,
    control: ControlTokens,
    *,
    gamma: float = 1.0,
    turn_gamma: float = 0.99,
    known: Sequence[KnownValues] = (),
    batch_size: int = 256,
) -> ValueReport:
    """Compare Q and V with the returns of episodes that were not trained on.

    The return of a token is the sum of the rewards from it onwards, discounted as the values are; the end of a
    truncated episode counts as ``V`` there.

    Args:
        actor: trunk, head and distribution; Q and V read its trunk.
        qvalue: a head or module that writes ``action_value`` ``[N, n_q, V]``; target parameters are less noisy.
        value: a head or module that writes ``state_value`` ``[N, 1]``.
        rows: entries of a row and ``terminated``, ``[N]``.
        control: the control tokens of the rows.
        gamma: discount per token inside an utterance.
        turn_gamma: discount from an utterance to the next.
        known: states with exact values of some utterances, for :attr:`ValueReport.rank_accuracy`.
        batch_size: rows at a time.

    Raises:
        ValueError: the rows have no token of the agent.

    Examples:
        >>> import torch
        >>> from torchrl_lang.text import CharTokenizer, Episode, Turn, to_rows
        >>> from torchrl_lang.evaluation import value_report
        >>> from torchrl_lang.modules import QValueHead, ValueHead, causal_lm, language_actor
        >>> tokenizer = CharTokenizer.from_alphabet("abc")
        >>> rows = to_rows([Episode([Turn(w, reward=r)], True) for w, r in (("ab", 1.0), ("c", 0.0))], tokenizer, 6)
        >>> lm = causal_lm(vocab_size=tokenizer.vocab_size, layers=1, width=8, heads=2, max_length=6)
        >>> heads = QValueHead(8, tokenizer.vocab_size), ValueHead(8)
        >>> value_report(language_actor(lm), *heads, rows, tokenizer.control).tokens
        5
    """
    modules = nn.ModuleList([actor, qvalue, value])
    with eval_mode(modules):
        parts = [_measure(actor, qvalue, value, part, control, gamma, turn_gamma) for part in rows.split(batch_size)]
    q, v, returns, target, untried = (torch.cat(column).double() for column in zip(*parts, strict=True))
    if not q.numel():
        raise ValueError(f"The {len(rows)} rows have no token of the agent to compare values at.")
    deviation = q - q.mean()
    correlations = torch.stack([q, v, returns]).corrcoef()[2]
    return ValueReport(
        tokens=q.numel(),
        qvalue_correlation=float(correlations[0]),
        value_correlation=float(correlations[1]),
        qvalue_fit=float(1 - (target - q).square().mean() / target.var(correction=0).clamp_min(1e-12)),
        qvalue_slope=float((deviation * (returns - returns.mean())).sum() / deviation.square().sum().clamp_min(1e-12)),
        qvalue_bias=float((q - returns).mean()),
        untried_rate=float(untried.mean()),
        rank_accuracy=rank_accuracy(actor, qvalue, known, control),
    )


def _measure(
    actor: ProbabilisticTensorDictSequential,
    qvalue: nn.Module,
    value: nn.Module,
    rows: TensorDictBase,
    control: ControlTokens,
    gamma: float,
    turn_gamma: float,
) -> Sequence[Tensor]:
    """Q of the taken token, V, return, Q's target, and whether Q prefers an untried token: each ``[N]``."""
    batch, scorer = DecisionBatch.read(rows), RowScorer(actor)
    if batch.empty:
        return [torch.zeros(0)] * 5
    states = scorer.states(batch, whole=True)
    number, width = batch.tokens.shape
    last = (row_length(batch.attention_mask) - 1).clamp_min(0)
    ends = torch.arange(number, device=last.device) * width + last
    chosen, final = ({k: s.flatten(0, 1)[place] for k, s in states.items()} for place in (batch.place, ends))
    table = apply_head(qvalue, chosen, ACTION_VALUE).amin(-2)
    v = apply_head(value, chosen, STATE_VALUE).squeeze(-1)
    last_value = apply_head(value, final, STATE_VALUE).squeeze(-1)
    last_value = torch.where(entry(rows, TERMINATED).reshape(-1), 0.0, last_value)
    reward = shift_left(entry(rows, TOKEN_REWARD).reshape(number, -1)[:, :width])
    decision = decision_mask(batch.agent_mask)
    turn_ends = turn_end_mask(batch.attention_mask, batch.agent_mask, batch.tokens, control.end_of_action)

    def target(lmbda: float) -> Tensor:
        """The discounted rewards to go (lambda 1), or Q's one-step targets (lambda 0), ``[N]``."""
        clocks: Any = {"gamma": gamma, "lmbda": lmbda, "turn_gamma": turn_gamma, "turn_lmbda": lmbda}
        found = two_clock_advantages(reward, batch.at_decisions(v), last_value, decision, turn_ends, **clocks)
        return found.value_target.flatten()[batch.place]

    log_prob = scorer.log_softmax(states, batch.place)
    allowed = table.clone()
    allowed[:, list(control.forbidden_in_action())] = -torch.inf
    allowed[:, control.vocab_size :] = -torch.inf
    best = allowed.argmax(-1, keepdim=True)
    untried = log_prob.gather(-1, best).squeeze(-1).exp() < _UNTRIED
    return table.gather(-1, batch.action[:, None]).squeeze(-1), v, target(1.0), target(0.0), untried
