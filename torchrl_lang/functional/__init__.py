"""Pure tensor functions: decisions of a row, returns, advantages, value terms, logit filters and divergences."""

from torchrl_lang.functional.advantages import (
    group_advantages,
    standardized,
    state_advantages,
    turn_advantages,
    turn_states,
    two_clock_advantages,
)
from torchrl_lang.functional.decisions import decision_mask, find_decisions, shift_left, turn_end_mask
from torchrl_lang.functional.filters import filter_logits
from torchrl_lang.functional.kl import categorical_kl, kl_estimate, projected_kl
from torchrl_lang.functional.random import random_index
from torchrl_lang.functional.returns import lambda_returns, return_conditions, returns_to_go
from torchrl_lang.functional.value_terms import advantage_weight, cql_term, expectile_loss, margin_term

__all__ = [
    "advantage_weight",
    "categorical_kl",
    "cql_term",
    "decision_mask",
    "expectile_loss",
    "filter_logits",
    "find_decisions",
    "group_advantages",
    "kl_estimate",
    "lambda_returns",
    "margin_term",
    "projected_kl",
    "random_index",
    "return_conditions",
    "returns_to_go",
    "shift_left",
    "standardized",
    "state_advantages",
    "turn_advantages",
    "turn_end_mask",
    "turn_states",
    "two_clock_advantages",
]
