"""Estimates of a Kullback-Leibler divergence from log-probabilities of sampled actions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_lang._checks import one_of
from torchrl_lang.functional.precision import upcast_half

__all__ = ["KLDirection", "KLEstimator", "kl_estimate"]

KLEstimator = Literal["k1", "k2", "k3"]
KLDirection = Literal["reverse", "forward"]


def kl_estimate(
    log_prob: Tensor, ref_log_prob: Tensor, estimator: KLEstimator = "k1", direction: KLDirection = "reverse"
) -> Tensor:
    """Estimate the divergence of policy ``pi`` and reference ``ref`` from samples of ``pi``, elementwise.

    With ``rho = ref / pi`` of the action taken and ``x = log rho`` (Schulman 2020, "Approximating KL Divergence",
    http://joschu.net/blog/kl-approx.html; forward is the same with importance weights):

    ========  =================  ====================
    ..        reverse            forward
              ``KL(pi || ref)``  ``KL(ref || pi)``
    ========  =================  ====================
    ``"k1"``  ``-x``             ``rho x``
    ``"k2"``  ``x**2 / 2``       ``x**2 / 2``
    ``"k3"``  ``rho - 1 - x``    ``rho x - (rho - 1)``
    ========  =================  ====================

    **As a value**, k1 and k3 are unbiased and k3 is never negative; k2 is biased and agrees with both directions to
    second order in the drift. All but reverse k1 need a policy that can generate everything that the reference can,
    which top-k or top-p sampling violates.

    **In a loss** that is differentiated on samples of the current policy, the mean gradient often belongs to another
    quantity:

    - k1 reverse: zero, so it only adds noise. k1 forward: that of ``KL(ref || pi) + E_ref[x**2] / 2``.
    - k2: exactly that of ``KL(pi || ref)``, for both directions.
    - k3 reverse: that of the *forward* divergence, ``KL(ref || pi)``. k3 forward: that of ``E_ref[x**2] / 2``.

    **In a reward**, detached and multiplied by ``grad log pi`` as in policy gradients, the mean gradient is:

    - k1 reverse: exactly that of ``KL(pi || ref)``, so use this one. k1 forward: that of ``-E_ref[x**2] / 2``, which
      drives the policy *away* from its reference.
    - k2 and k3: of second order in the drift, so near the reference they hardly restrain the policy. k3 reverse: that
      of ``KL(pi || ref) - KL(ref || pi)``. k3 forward: that of ``KL(ref || pi) - E_ref[x**2] / 2``.

    All this holds for one decision. Over a row, a loss with one estimate per token ignores that a token changes the
    following states; summed log-probabilities (one estimate per row) and undiscounted rewards do not.

    Args:
        log_prob: ``log pi`` of the action taken, float, any shape.
        ref_log_prob: ``log ref`` of the same action, the same shape.
        estimator: ``"k1"``, ``"k2"`` or ``"k3"``.
        direction: ``"reverse"`` or ``"forward"``.

    Returns:
        The shape of the input, at least float32. Impossible actions have the limits of the formulas: impossible under
        ``ref`` alone ``inf`` (forward k1: 0, forward k3: 1); under both 0.

    Raises:
        ValueError: the estimator or direction is unknown, or shapes differ.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import kl_estimate
        >>> log_prob, ref_log_prob = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
        >>> kl_estimate(log_prob, ref_log_prob)
        tensor([ 0.6931, -0.4055])
        >>> kl_estimate(log_prob, ref_log_prob, "k3")  # the same mean, 0.1438
        tensor([0.1931, 0.0945])
    """
    one_of("estimator", estimator, ("k1", "k2", "k3"))
    one_of("direction", direction, ("reverse", "forward"))
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(
            f"log_prob {list(log_prob.shape)} and ref_log_prob {list(ref_log_prob.shape)} must have one shape: pass "
            "the log-probabilities of the same actions."
        )
    log_prob, ref_log_prob = upcast_half(log_prob), upcast_half(ref_log_prob)
    if (estimator, direction) == ("k1", "reverse"):
        return _log_ratio(log_prob, ref_log_prob)
    x = _log_ratio(ref_log_prob, log_prob)
    if estimator == "k2":
        return x.square() / 2
    # Clamping x to the range that rounding can represent avoids inf - inf and 0 * inf in values and gradients.
    # The clamp of k3 is for devices whose expm1(x) may round to below x.
    if direction == "reverse":
        x = x.clamp_max(1e4)
        return (x.expm1() - x).clamp_min(0)
    if estimator == "k1":
        return x.exp() * x.clamp_min(-1e4)
    x = x.clamp_min(-80.0)
    return (x.exp() * ((-x).expm1() + x)).clamp_min(0)


def _log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``log(p / q)``, 0 if both are impossible."""
    return (log_p - log_q).masked_fill(torch.maximum(log_p, log_q) == -torch.inf, 0)
