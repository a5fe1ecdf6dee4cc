"""Pure tensor functions: decisions of a row, returns, advantages, value terms, logit filters and divergences."""

from torchrl_lang.functional.advantages import (
    Advantages,
    Bootstrap,
    group_advantages,
    standardized,
    turn_end_mask,
    two_clock_advantages,
    with_known_values,
)
from torchrl_lang.functional.decisions import (
    Decisions,
    bootstrap_mask,
    decision_mask,
    find_decisions,
    row_length,
    shift_left,
    shift_right,
    trained_states,
    utterance_ends,
)
from torchrl_lang.functional.divergences import categorical_entropy, categorical_kl, projected_kl
from torchrl_lang.functional.filters import filter_logits, min_p_filter, top_k_filter, top_p_filter
from torchrl_lang.functional.kl_estimates import KLDirection, KLEstimator, kl_estimate
from torchrl_lang.functional.likelihoods import likelihood_ratio_value, weighted_cross_entropy
from torchrl_lang.functional.linear_terms import LinearTerm, linear_cross_entropy, linear_margin
from torchrl_lang.functional.path_consistency import PathLevel, action_log_ratio, soft_returns
from torchrl_lang.functional.random import random_index
from torchrl_lang.functional.random_stream import RandomStream, generators, seeded_generators
from torchrl_lang.functional.return_conditions import (
    ReturnConditions,
    ReturnMode,
    return_conditions,
    utterance_states,
)
from torchrl_lang.functional.returns import lambda_returns, returns_to_go, reverse_linear_scan, td_target
from torchrl_lang.functional.utterances import UtteranceSpans, find_utterances, running_mean
from torchrl_lang.functional.value_terms import (
    advantage_weight,
    bcq_value,
    cql_term,
    expectile_loss,
    huber_loss,
    margin_term,
    masked_mean,
    sampled_cql_term,
)

__all__ = [
    "Advantages",
    "Bootstrap",
    "Decisions",
    "KLDirection",
    "KLEstimator",
    "LinearTerm",
    "PathLevel",
    "RandomStream",
    "ReturnConditions",
    "ReturnMode",
    "UtteranceSpans",
    "action_log_ratio",
    "advantage_weight",
    "bcq_value",
    "bootstrap_mask",
    "categorical_entropy",
    "categorical_kl",
    "cql_term",
    "decision_mask",
    "expectile_loss",
    "filter_logits",
    "find_decisions",
    "find_utterances",
    "generators",
    "group_advantages",
    "huber_loss",
    "kl_estimate",
    "lambda_returns",
    "likelihood_ratio_value",
    "linear_cross_entropy",
    "linear_margin",
    "margin_term",
    "masked_mean",
    "min_p_filter",
    "projected_kl",
    "random_index",
    "return_conditions",
    "returns_to_go",
    "reverse_linear_scan",
    "row_length",
    "running_mean",
    "sampled_cql_term",
    "seeded_generators",
    "shift_left",
    "shift_right",
    "soft_returns",
    "standardized",
    "td_target",
    "top_k_filter",
    "top_p_filter",
    "trained_states",
    "turn_end_mask",
    "two_clock_advantages",
    "utterance_ends",
    "utterance_states",
    "weighted_cross_entropy",
    "with_known_values",
]
