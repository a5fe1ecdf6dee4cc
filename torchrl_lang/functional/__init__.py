"""Pure tensor functions: decisions of a row, returns, advantages, value terms, logit filters and divergences."""

from torchrl_lang.functional.advantages import group_advantages, standardized, two_clock_advantages
from torchrl_lang.functional.decisions import (
    decision_mask,
    find_decisions,
    find_utterances,
    shift_left,
    shift_right,
    turn_end_mask,
)
from torchrl_lang.functional.filters import filter_logits
from torchrl_lang.functional.kl import categorical_entropy, categorical_kl, kl_estimate, projected_kl
from torchrl_lang.functional.linear import linear_cross_entropy
from torchrl_lang.functional.random import random_index
from torchrl_lang.functional.returns import lambda_returns, return_conditions, returns_to_go, td_target
from torchrl_lang.functional.value_terms import (
    advantage_weight,
    bcq_value,
    cql_term,
    expectile_loss,
    margin_term,
    masked_mean,
)

__all__ = [
    "advantage_weight",
    "bcq_value",
    "categorical_entropy",
    "categorical_kl",
    "cql_term",
    "decision_mask",
    "expectile_loss",
    "filter_logits",
    "find_decisions",
    "find_utterances",
    "group_advantages",
    "kl_estimate",
    "lambda_returns",
    "linear_cross_entropy",
    "margin_term",
    "masked_mean",
    "projected_kl",
    "random_index",
    "return_conditions",
    "returns_to_go",
    "shift_left",
    "shift_right",
    "standardized",
    "td_target",
    "turn_end_mask",
    "two_clock_advantages",
]
