"""Functions of rows do the same for any batch shape, for one row, and beside more padding."""

import pytest
import torch

from tests.functional.test_advantages import ragged
from torchrl_lang import functional as f
from torchrl_lang.functional import advantages, decisions, kl, returns, value_terms

REAL, AGENT, REWARD, VALUE, LAST = ragged(6, 12)
DECISION, ENDS = f.decision_mask(AGENT), f.turn_end_mask(REAL, AGENT)
TOKENS = torch.randint(2, 5, REAL.shape, generator=torch.Generator().manual_seed(1)) * REAL
CLOCKED = (REWARD, VALUE, LAST, DECISION, ENDS)
GROUP, STATE = torch.tensor([0, 0, 0, 1, 1, 1]), advantages.turn_states(TOKENS, AGENT, ENDS)
LOGITS, OTHERS = torch.randn(2, 6, 12, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
P, Q = LOGITS.log_softmax(-1), OTHERS.log_softmax(-1)

ROWS = {
    "shift_left": (f.shift_left, REWARD),
    "shift_right": (decisions.shift_right, REWARD),
    "decision_mask": (f.decision_mask, AGENT),
    "row_length": (decisions.row_length, REAL),
    "utterance_ends": (lambda *row: decisions.utterance_ends(*row, 2), TOKENS, REAL, AGENT),
    "trained_states": (decisions.trained_states, REWARD > 0, AGENT),
    "begins_utterance": (decisions.begins_utterance, DECISION, ENDS),
    "running_mean": (decisions.running_mean, LOGITS),
    "turn_end_mask": (f.turn_end_mask, REAL, AGENT),
    "turn_end_mask of tokens": (lambda *row: f.turn_end_mask(*row, 2), REAL, AGENT, TOKENS),
    "utterance_states": (lambda *row: decisions.utterance_states(*row, 2), REAL, AGENT, TOKENS),
    "returns_to_go": (lambda *row: f.returns_to_go(*row, 0.9), REWARD, DECISION),
    "lambda_returns": (lambda *row: f.lambda_returns(*row, 0.9, 0.8), REWARD, VALUE, LAST, DECISION),
    "soft_returns": (lambda *row: returns.soft_returns(*row, 0.5), REWARD, VALUE, LAST, DECISION),
    **{
        f"action_log_ratio, {level}": (
            lambda *row, level=level: returns.action_log_ratio(*row, level),
            VALUE * DECISION,
            DECISION,
            ENDS,
        )
        for level in ("token", "utterance", "row")
    },
    **{
        f"return_conditions, {mode}": (
            lambda *row, mode=mode: returns.return_conditions(*row, mode),
            REAL,
            AGENT,
            REWARD,
        )
        for mode in ("constant", "decremented")
    },
    "two_clock_advantages": (f.two_clock_advantages, *CLOCKED),
    "two_clock_advantages, mean": (lambda *row: f.two_clock_advantages(*row, bootstrap="mean"), *CLOCKED),
    "turn_advantages": (f.turn_advantages, *CLOCKED),
    "with_known_values": (advantages.with_known_values, VALUE, REWARD, LAST, DECISION, ENDS),
    "turn_states, prefix": (advantages.turn_states, TOKENS, AGENT, ENDS),
    "turn_states, observation": (lambda *row: advantages.turn_states(*row, anchor="observation"), TOKENS, AGENT, ENDS),
    "over_turns": (advantages.over_turns, VALUE, DECISION, ENDS),
    "kl_estimate": (lambda *row: f.kl_estimate(*row, "k3"), VALUE, REWARD),
    "categorical_entropy": (kl.categorical_entropy, P),
    "categorical_kl": (f.categorical_kl, LOGITS, OTHERS),
    "categorical_kl in pieces": (lambda *row: f.categorical_kl(*row, chunk_size=7), LOGITS, OTHERS),
    "filter_logits": (lambda row: f.filter_logits(row, top_k=3, top_p=0.8, min_p=0.05), LOGITS),
    "expectile_loss": (lambda row: f.expectile_loss(row, 0.8), VALUE),
    "advantage_weight": (lambda row: f.advantage_weight(row, 2.0, clip=3.0), VALUE),
    "likelihood_ratio_value": (value_terms.likelihood_ratio_value, P[..., 0], Q[..., 0]),
}
"""A function and its rows, of which the first dimension is the batch."""
BATCHES = {
    "group_advantages": (f.group_advantages, VALUE[:, 0], GROUP),
    "state_advantages": (f.state_advantages, VALUE, GROUP, STATE, DECISION, ENDS),
    "standardized": (advantages.standardized, VALUE, DECISION),
    "masked_mean": (value_terms.masked_mean, VALUE, DECISION),
    "explained_variance": (value_terms.explained_variance, VALUE, REWARD, DECISION),
}
"""Functions that compare rows with each other."""


def call(function, rows):
    """What a function returns, as a tuple of tensors."""
    found = function(*rows)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", [*ROWS, "standardized", "masked_mean", "explained_variance"])
def test_any_batch_shape(name):
    function, *rows = (ROWS | BATCHES)[name]
    flat, deep = call(function, rows), call(function, [row.unflatten(0, (2, 3)) for row in rows])
    for one, other in zip(flat, deep, strict=True):
        torch.testing.assert_close(other, one.unflatten(0, (2, 3)) if one.dim() else one)


@pytest.mark.parametrize("name", ROWS)
def test_each_row_alone(name):
    function, *rows = ROWS[name]
    for number, row in enumerate(zip(*rows, strict=True)):
        for together, alone in zip(call(function, rows), call(function, row), strict=True):
            torch.testing.assert_close(alone, together[number])


@pytest.mark.parametrize("name", [*ROWS, *BATCHES])
def test_more_padding(name):
    function, *rows = (ROWS | BATCHES)[name]
    width, read = REAL.shape[-1], DECISION if name in BATCHES else REAL
    wide = [torch.cat([row, torch.zeros_like(row[:, :3])], 1) if row.dim() > 1 else row for row in rows]
    for one, other in zip(call(function, rows), call(function, wide), strict=True):
        if one.dim() > 1:
            one, other = one[read], other[:, :width][read]
        torch.testing.assert_close(other, one)
