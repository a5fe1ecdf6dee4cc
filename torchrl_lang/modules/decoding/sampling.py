"""Sampling utterances token by token, greedily too: the loop."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_lang.modules.decoding.memory import departure
from torchrl_lang.modules.decoding.readers import Reader
from torchrl_lang.modules.decoding.rule import NextTokenRule
from torchrl_lang.schema import ControlTokens

__all__ = ["Prompt", "Utterances", "entropy", "pick", "sample_utterances", "taken"]


class Prompt(NamedTuple):
    """Rows to be continued."""

    tokens: Tensor
    """int64 ``[N, P]``, right-padded, ``P`` the longest row."""
    length: Tensor
    """int64 ``[N]``, at least 1."""


class Utterances(NamedTuple):
    """Utterances as they were decoded. The last slot is an end-of-action token wherever none came before: it is
    certain, so its log-probability and entropy are zero, as they are on padding.
    """

    action: Tensor
    """int64 ``[N, K]``."""
    token_log_prob: Tensor
    """float32 ``[N, K]``, under the distribution that was sampled from."""
    behavior_log_prob: Tensor
    """float32 ``[N, K]``, under the language model alone; zero unless asked for."""
    token_entropy: Tensor
    """float32 ``[N, K]``, of the distribution that was sampled from; zero unless asked for."""
    advantage: Tensor
    """float32 ``[N]``, sum of ``A = min_k Q_k - V`` over the tokens; zero unless asked for."""

    @classmethod
    def empty(cls, n: int, k: int, control: ControlTokens, device: torch.device) -> Utterances:
        """``n`` silent utterances: an end of action, then padding."""
        action = torch.full((n, k), control.pad, dtype=torch.int64, device=device)
        action[:, 0] = control.end_of_action
        zeros = torch.zeros(n, k, device=device)
        return cls(action, zeros, zeros.clone(), zeros.clone(), torch.zeros(n, device=device))

    def select(self, rows: Tensor) -> Utterances:
        """These rows, int64 ``[M]``, in this order."""
        return Utterances(*(values.index_select(0, rows) for values in self))

    def place(self, rows: Tensor, other: Utterances) -> Utterances:
        """A copy with ``other`` at the given rows, int64 ``[M]``."""
        return Utterances(*(ours.index_put((rows,), theirs) for ours, theirs in zip(self, other, strict=True)))


def pick(log_prob: Tensor, uniform: Tensor | None) -> Tensor:
    """Draw a token for each row by inverting the distribution function at ``uniform``; without it, the likeliest.

    The number is drawn outside, one a token, so that what a row says does not depend on which other rows still speak.

    Args:
        log_prob: float ``[N, V]``.
        uniform: float ``[N]`` in ``[0, 1)``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.modules.decoding import pick
        >>> log_prob = torch.tensor([[0.25, 0.75], [0.25, 0.75]]).log()
        >>> pick(log_prob, torch.tensor([0.2, 0.3])), pick(log_prob, None)
        (tensor([0, 1]), tensor([1, 1]))
    """
    if uniform is None:
        return log_prob.argmax(-1)
    cumulative = log_prob.exp().cumsum(-1)
    total = cumulative[:, -1]
    # Rounding must not lift the threshold to the total: no token lies beyond it.
    threshold = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)


def sample_utterances(
    reader: Reader,
    rule: NextTokenRule,
    prompt: Prompt,
    control: ControlTokens,
    action_length: int,
    *,
    uniform: Tensor | None = None,
    candidates: int = 1,
    diagnostics: bool = False,
    advantage: bool = False,
) -> Utterances:
    """Continue each prompt by one utterance of at most ``action_length`` tokens, its end included.

    Rows that have finished leave the batch once a quarter of it has.

    Args:
        reader: of rows at least ``P + action_length`` long.
        rule: distribution of the next token.
        prompt: ``N`` rows.
        control: ids of the control tokens.
        action_length: ``K``.
        uniform: float ``[N * candidates, K]`` in ``[0, 1)``, one number a token; without it decoding is greedy.
        candidates: utterances for each prompt, which is read once. Row ``i`` continues prompt ``i // candidates``.
        diagnostics: also fill in ``behavior_log_prob`` and ``token_entropy``.
        advantage: also fill in ``advantage``.
    """
    position, longest = prompt.length, prompt.tokens.shape[-1]
    out = Utterances.empty(position.shape[0] * candidates, action_length, control, position.device)
    if action_length == 1 or out.action.shape[0] == 0:
        return out
    states = reader.start(prompt.tokens, position)
    if candidates > 1:
        copies = torch.arange(position.shape[0], device=position.device).repeat_interleave(candidates)
        reader.select(copies)
        states, position = {key: value[copies] for key, value in states.items()}, position[copies]
    row = torch.arange(out.action.shape[0], device=position.device)
    finished = torch.zeros_like(row, dtype=torch.bool)
    for slot in range(action_length - 1):
        log_prob = rule(states)
        token = pick(log_prob, None if uniform is None else uniform[row, slot])
        out.action[row, slot] = token.masked_fill(finished, control.pad)
        _record(out.token_log_prob, row, slot, taken(log_prob, token), finished)
        if diagnostics:
            _record(out.behavior_log_prob, row, slot, taken(rule.behavior(states), token), finished)
            _record(out.token_entropy, row, slot, entropy(log_prob), finished)
        if advantage and rule.guidance is not None:
            gained = rule.guidance.advantage(states, token[:, None]).squeeze(-1).masked_fill(finished, 0.0)
            out.advantage[row] += gained.to(out.advantage.dtype)
        finished = finished | (token == control.end_of_action)
        speaking = int((~finished).sum())  # the one wait for the device
        if speaking == 0:
            break
        if slot == action_length - 2:
            # The last slot is for the end of the action, whatever the model would say: nothing is left to compute.
            out.action[row, slot + 1] = torch.where(finished, control.pad, control.end_of_action)
            break
        if speaking <= 0.75 * finished.shape[0]:
            moves = departure(~finished)
            reader.leave(moves)
            row, token, position, finished = (x[moves.order] for x in (row, token, position, finished))
        states = reader.advance(token, position, longest + slot + 1)
        position = position + 1
    return out


def _record(out: Tensor, row: Tensor, slot: int, values: Tensor, finished: Tensor) -> None:
    out[row, slot] = values.masked_fill(finished, 0.0).to(out.dtype)


def taken(values: Tensor, token: Tensor) -> Tensor:
    """Each row's value at its token, ``[N, V], int64 [N] -> [N]``."""
    return values.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def entropy(log_prob: Tensor) -> Tensor:
    """Entropy of each row's distribution in nats, ``[N, V] -> [N]``; ``-inf`` is no trouble."""
    return torch.special.entr(log_prob.exp()).sum(-1)
