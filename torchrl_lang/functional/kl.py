"""Kullback-Leibler divergences: estimates from sampled actions, exact ones over a vocabulary, and entropy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from torchrl_lang._checks import check_options, have_shapes
from torchrl_lang.functional.precision import upcast_half

__all__ = ["KLDirection", "KLEstimator", "categorical_entropy", "categorical_kl", "kl_estimate", "projected_kl"]

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
    check_options(estimator=(estimator, get_args(KLEstimator)), direction=(direction, get_args(KLDirection)))
    have_shapes(("ref_log_prob", ref_log_prob, tuple(log_prob.shape)))
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


def categorical_entropy(log_prob: Tensor) -> Tensor:
    """Entropy in nats of normalised distributions, with finite gradients if tokens have probability zero.

    Args:
        log_prob: float ``[*B, V]``, logarithms of probabilities that sum to one; may be ``-inf``.

    Returns:
        ``[*B]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import categorical_entropy
        >>> categorical_entropy(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]]).log())
        tensor([0.6931, 1.0397])
    """
    # Probabilities below the bound are zero in any precision; the bound avoids 0 * inf = NaN.
    return -(log_prob.exp() * log_prob.clamp_min(-1e4)).sum(-1)


def categorical_kl(logits: Tensor, ref_logits: Tensor, *, chunk_size: int = 1024) -> Tensor:
    """Exact ``KL(softmax(logits) || softmax(ref_logits))`` over the last dimension, computed in chunks.

    The softmax over the whole vocabulary is never stored: without gradients, temporaries take at most
    ``32 * chunk_size`` bytes per position (for ``chunk_size >= 16`` and float32 or narrower), whatever ``V``. With
    gradients, autograd keeps the chunks until the backward pass.

    Args:
        logits: float ``[*B, V]``, the policy's, unnormalised; ``-inf`` for forbidden tokens.
        ref_logits: float ``[*B, V]``, the reference's.
        chunk_size: tokens per chunk.

    Returns:
        ``[*B]``, at least float32, never negative: ``inf`` if the policy may generate a token that the reference
        cannot, NaN if the policy forbids all tokens. For the forward divergence swap the arguments.

    Raises:
        ValueError: shapes differ or ``chunk_size`` is below 1.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import categorical_kl
        >>> policy, reference = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
        >>> categorical_kl(policy, reference), categorical_kl(reference, policy)
        (tensor(0.3466), tensor(inf))
    """
    have_shapes(("ref_logits", ref_logits, tuple(logits.shape)))
    check_options(chunk_size=(chunk_size, 1))
    if logits.shape[-1] <= chunk_size:
        return _kl_at_once(upcast_half(logits), upcast_half(ref_logits))
    pairs = zip(logits.split(chunk_size, -1), ref_logits.split(chunk_size, -1), strict=True)
    return _kl_of_slices(((upcast_half(a), upcast_half(b)) for a, b in pairs), _no_sums(logits, ref_logits))


def projected_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: float = 1.0,
    ref_temperature: float = 1.0,
    forbidden: Tensor | None = None,
    chunk_size: int = 1024,
) -> Tensor:
    """:func:`categorical_kl` of ``(hidden @ weight.T + bias) / temperature`` from the reference's, without ``[N, V]``.

    Each chunk of the vocabulary is projected and added to running sums. Without gradients, temporaries take at most
    ``32 * chunk_size`` bytes per position (for ``chunk_size >= 16`` and float32 or narrower), whatever ``V``.

    Args:
        hidden: float ``[*N, H]``, the input of the policy's language-model head.
        weight: float ``[V, H]``, the weight of that head.
        ref_hidden: float ``[*N, H']``.
        ref_weight: float ``[V, H']``.
        bias: float ``[V]``.
        ref_bias: float ``[V]``.
        temperature: the policy's temperature, above zero.
        ref_temperature: the reference's temperature, above zero.
        forbidden: bool ``[V]``, True for tokens that neither may generate.
        chunk_size: tokens per chunk.

    Returns:
        ``[*N]``, as :func:`categorical_kl` does.

    Raises:
        ValueError: shapes do not match, a temperature is not positive, or ``chunk_size`` is below 1.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional import projected_kl
        >>> hidden, head = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> projected_kl(hidden, head, hidden, head)
        tensor([0., 0.])
        >>> projected_kl(hidden, head, hidden.flip(0), head, forbidden=torch.tensor([False, False, True]))
        tensor([0.4621, 0.4621])
    """
    above = "(0, inf)"
    check_options(
        chunk_size=(chunk_size, 1), temperature=(temperature, above), ref_temperature=(ref_temperature, above)
    )
    vocabulary = weight.shape[0]
    have_shapes(
        ("ref_hidden", ref_hidden, (*hidden.shape[:-1], ref_hidden.shape[-1])),
        ("weight", weight, (vocabulary, hidden.shape[-1])),
        ("ref_weight", ref_weight, (vocabulary, ref_hidden.shape[-1])),
        ("bias", bias, (vocabulary,)),
        ("ref_bias", ref_bias, (vocabulary,)),
        ("forbidden", forbidden, (vocabulary,)),
    )
    weights, ref_weights = weight.split(chunk_size), ref_weight.split(chunk_size)
    columns = [
        (None,) * len(weights) if column is None else column.split(chunk_size) for column in (bias, ref_bias, forbidden)
    ]
    pairs = (
        (_project(hidden, w, b, temperature, never), _project(ref_hidden, ref_w, ref_b, ref_temperature, never))
        for w, ref_w, b, ref_b, never in zip(weights, ref_weights, *columns, strict=True)
    )
    return _kl_of_slices(pairs, _no_sums(hidden, ref_hidden))


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, never: Tensor | None) -> Tensor:
    """Logits of one chunk of the vocabulary, ``[*N, chunk]``."""
    logits = upcast_half(F.linear(hidden, weight, bias))
    if temperature != 1.0:
        logits = logits / temperature
    return logits if never is None else logits.masked_fill(never, -torch.inf)


def _kl_at_once(a: Tensor, b: Tensor) -> Tensor:
    """``sum p (log p - log q)`` of logits ``[*B, V]``, for a vocabulary of one chunk."""
    a, b = a.log_softmax(-1), b.log_softmax(-1)
    possible, ref_possible = a != -torch.inf, b != -torch.inf
    gap = (a - b).masked_fill(~(possible & ref_possible), 0)
    kl = (a.exp() * gap).sum(-1).clamp_min(0)
    return kl.masked_fill((possible & ~ref_possible).any(-1) & ~kl.isnan(), torch.inf)


class _Sums(NamedTuple):
    """Running sums over the chunks, each ``[*B]``; ``a`` is the policy, ``b`` the reference."""

    max_a: Tensor
    """Running maximum ``m_a``; a constant for autograd, because the divergence does not depend on it."""
    sum_a: Tensor
    """``s_a = sum exp(a - m_a)``."""
    max_b: Tensor
    sum_b: Tensor
    gap: Tensor
    """``t = sum exp(a - m_a) ((a - m_a) - (b - m_b))``."""
    impossible: Tensor
    """bool: True if the policy may generate a token that the reference cannot."""


def _no_sums(policy: Tensor, reference: Tensor) -> _Sums:
    """Initial sums for tensors ``[*B, anything]``."""
    dtype = torch.promote_types(torch.promote_types(policy.dtype, reference.dtype), torch.float32)
    zero = torch.zeros(policy.shape[:-1], dtype=dtype, device=policy.device)
    lowest = torch.full_like(zero, torch.finfo(dtype).min)  # finite, so that -inf - lowest is -inf, not NaN
    return _Sums(lowest, zero, lowest, zero, zero, zero.bool())


def _kl_of_slices(slices: Iterator[tuple[Tensor, Tensor]], sums: _Sums) -> Tensor:
    """``KL = t / s_a - log s_a + log s_b``, from pairs of logits ``[*B, chunk]``."""
    for a, b in slices:
        sums = _fold(sums, a, b)
    kl = (sums.gap / sums.sum_a + (sums.sum_b / sums.sum_a).log()).clamp_min(0)
    return kl.masked_fill(sums.impossible & ~kl.isnan(), torch.inf)


def _fold(sums: _Sums, a: Tensor, b: Tensor) -> _Sums:
    """Add one chunk. Raising the maxima by ``d_a``, ``d_b`` turns ``t`` into ``exp(-d_a) (t - s_a (d_a - d_b))``."""
    max_a, rise_a = _raised(sums.max_a, sums.sum_a, a)
    max_b, rise_b = _raised(sums.max_b, sums.sum_b, b)
    possible, ref_possible = a > -torch.inf, b > -torch.inf
    impossible = sums.impossible | (possible & ~ref_possible).any(-1)
    incomparable = ~(possible & ref_possible)
    del possible, ref_possible
    sum_b = sums.sum_b * (-rise_b).exp() + (b - max_b.unsqueeze(-1)).exp().sum(-1)
    weight = (a - max_a.unsqueeze(-1)).exp()
    gap = (a - max_a.unsqueeze(-1)) - (b - max_b.unsqueeze(-1))
    gap = weight * gap.masked_fill(incomparable, 0)
    keep = (-rise_a).exp()
    # Drop chunks whose weight has underflowed to zero: their gap may be infinite.
    carried = torch.where(keep > 0, keep * (sums.gap - sums.sum_a * (rise_a - rise_b)), 0)
    return _Sums(max_a, sums.sum_a * keep + weight.sum(-1), max_b, sum_b, carried + gap.sum(-1), impossible)


def _raised(maximum: Tensor, total: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The new running maximum, and the amount by which it rose: zero if nothing was summed yet."""
    raised = torch.maximum(maximum, logits.detach().amax(-1))
    return raised, torch.where(total > 0, raised - maximum, 0)
