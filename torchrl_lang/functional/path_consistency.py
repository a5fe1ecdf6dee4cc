"""Path consistency of a policy and its soft values (OREO, arXiv 2412.16145) over the decisions of a row."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.functional.decisions import shift_right
from torchrl_lang.functional.returns import lambda_returns, reverse_linear_scan

__all__ = ["PathLevel", "action_log_ratio", "soft_returns"]

PathLevel = Literal["token", "utterance", "row"]
"""What one action is: a token, an utterance, or all that the agent writes in a row."""


def soft_returns(reward: Tensor, log_ratio: Tensor, bootstrap: Tensor, decision: Tensor, beta: float) -> Tensor:
    """Rewards to go less the divergence to go, ``sum_{i >= t} (r_i - beta * l_i)``, float ``[*B, T]``.

    With ``l = log pi(a | s) - log pi_ref(a | s)`` of the policy of highest return less ``beta`` times its divergence
    from the reference, this is the value of every state on every path where actions decide alone what follows (OREO,
    arXiv 2412.16145, eq. 7).

    Args:
        reward: float ``[*B, T]``, the reward of the decision at that position; ignored elsewhere, as ``log_ratio``.
        log_ratio: float ``[*B, T]``, ``l``.
        bootstrap: float ``[*B]``, the value after a row's last decision, zero if the task has terminated.
        decision: bool ``[*B, T]``.
        beta: weight of the divergence.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import soft_returns
        >>> decision, ratio = torch.tensor([True, True, False]), torch.tensor([0.25, -0.5, 0.0])
        >>> soft_returns(torch.tensor([0.0, 1.0, 0.0]), ratio, torch.tensor(0.0), decision, beta=2.0)
        tensor([1.5000, 2.0000, 0.0000])
    """
    return lambda_returns(reward - beta * log_ratio, torch.zeros_like(reward), bootstrap, decision, 1.0, 1.0)


def action_log_ratio(log_ratio: Tensor, decision: Tensor, ends: Tensor, level: PathLevel) -> tuple[Tensor, Tensor]:
    """The log-ratio of each whole action, and where actions begin.

    Args:
        log_ratio: float ``[*B, T]``, of the token written at each decision; ignored elsewhere.
        decision: bool ``[*B, T]``.
        ends: bool ``[*B, T]``, the last decision of each utterance (:func:`turn_end_mask`).
        level: what an action is.

    Returns:
        float ``[*B, T]``: at an action's first decision the sum over its tokens; and bool ``[*B, T]``: True there.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import action_log_ratio
        >>> decision = torch.tensor([True, True, False, True])
        >>> ends = torch.tensor([False, True, False, True])
        >>> ratio, begins = action_log_ratio(torch.tensor([1.0, 2.0, 0.0, 4.0]), decision, ends, "utterance")
        >>> ratio[begins], begins
        (tensor([3., 4.]), tensor([ True, False, False,  True]))
    """
    one_of("level", level, ("token", "utterance", "row"))
    if level == "token":
        return log_ratio, decision
    closes = ends & decision if level == "utterance" else torch.zeros_like(decision)
    total = reverse_linear_scan((~closes).to(log_ratio.dtype), torch.where(decision, log_ratio, 0.0))
    if level == "utterance":  # its tokens stand side by side
        return total, decision & ~shift_right(decision & ~ends)
    return total, decision & (decision.cumsum(-1) == 1)
