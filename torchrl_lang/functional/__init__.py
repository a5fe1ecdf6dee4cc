"""Pure tensor functions: decisions of a row, returns, advantages, value terms, logit filters and divergences."""

from torchrl_lang.functional.advantages import group_advantages, state_advantages, turn_advantages, two_clock_advantages
from torchrl_lang.functional.decisions import decision_mask, shift_left, turn_end_mask
from torchrl_lang.functional.filters import filter_logits
from torchrl_lang.functional.kl import categorical_kl, kl_estimate
from torchrl_lang.functional.returns import lambda_returns, returns_to_go
from torchrl_lang.functional.value_terms import advantage_weight, cql_term, expectile_loss

__all__ = [
    "advantage_weight",
    "categorical_kl",
    "cql_term",
    "decision_mask",
    "expectile_loss",
    "filter_logits",
    "group_advantages",
    "kl_estimate",
    "lambda_returns",
    "returns_to_go",
    "shift_left",
    "state_advantages",
    "turn_advantages",
    "turn_end_mask",
    "two_clock_advantages",
]
