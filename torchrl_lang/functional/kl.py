"""Kullback-Leibler divergences: estimates from sampled actions, exact ones over a vocabulary, and entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_lang._checks import check_options, have_shapes
from torchrl_lang.functional.fast_linear import fast_linear
from torchrl_lang.functional.precision import upcast_half

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
        >>> from torchrl_lang.functional.kl import categorical_entropy
        >>> categorical_entropy(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]]).log())
        tensor([0.6931, 1.0397])
    """
    # Probabilities below the bound are zero in any precision; the bound avoids 0 * inf = NaN.
    return -(log_prob.exp() * log_prob.clamp_min(-1e4)).sum(-1)


def categorical_kl(logits: Tensor, ref_logits: Tensor, *, chunk_size: int = 1024) -> Tensor:
    """Exact ``KL(softmax(logits) || softmax(ref_logits))`` over the last dimension, some positions at a time.

    Without gradients, temporaries take at most ``32 * chunk_size`` bytes per position (for float32 or narrower),
    whatever ``V``, and at least those of one position. With gradients, autograd keeps all until the backward pass.

    Args:
        logits: float ``[*B, V]``, the policy's, unnormalised; ``-inf`` for forbidden tokens.
        ref_logits: float ``[*B, V]``, the reference's.
        chunk_size: logits at a time, per position of the input.

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
    a, b = (x.reshape(-1, x.shape[-1]) for x in (logits, ref_logits))
    if torch.is_grad_enabled() and (logits.requires_grad or ref_logits.requires_grad):
        # Pieces would save no memory, and the gradient of each is as large as that of all logits.
        check_options(chunk_size=(chunk_size, 1))
        return _kl(a, b).reshape(logits.shape[:-1])
    return _in_pieces(lambda part: (a[part], b[part]), logits.shape, chunk_size)


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

    The logits of some positions exist at a time; memory is that of :func:`categorical_kl`.

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
        chunk_size: logits at a time, per position of the input.

    Returns:
        ``[*N]``, as :func:`categorical_kl` does.

    Raises:
        ValueError: shapes do not match, a temperature is not positive, or ``chunk_size`` is below 1.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.kl import projected_kl
        >>> hidden, head = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> projected_kl(hidden, head, hidden, head)
        tensor([0., 0.])
        >>> projected_kl(hidden, head, hidden.flip(0), head, forbidden=torch.tensor([False, False, True]))
        tensor([0.4621, 0.4621])
    """
    above = "(0, inf)"
    check_options(temperature=(temperature, above), ref_temperature=(ref_temperature, above))
    vocabulary = weight.shape[0]
    have_shapes(
        ("ref_hidden", ref_hidden, (*hidden.shape[:-1], ref_hidden.shape[-1])),
        ("weight", weight, (vocabulary, hidden.shape[-1])),
        ("ref_weight", ref_weight, (vocabulary, ref_hidden.shape[-1])),
        ("bias", bias, (vocabulary,)),
        ("ref_bias", ref_bias, (vocabulary,)),
        ("forbidden", forbidden, (vocabulary,)),
    )
    own, other = hidden.reshape(-1, hidden.shape[-1]), ref_hidden.reshape(-1, ref_hidden.shape[-1])

    def logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
        found = upcast_half(fast_linear(hidden, weight, bias)) / temperature
        return found if forbidden is None else found.masked_fill(forbidden, -torch.inf)

    def pair(part: slice) -> tuple[Tensor, Tensor]:
        reference = logits(other[part], ref_weight, ref_bias, ref_temperature)
        return logits(own[part], weight, bias, temperature), reference

    return _in_pieces(pair, torch.Size([*hidden.shape[:-1], vocabulary]), chunk_size)


def _in_pieces(pair: Callable[[slice], tuple[Tensor, Tensor]], shape: torch.Size, chunk_size: int) -> Tensor:
    """The divergences of two logits of ``shape`` ``[*B, V]``, of some of the positions at a time."""
    check_options(chunk_size=(chunk_size, 1))
    positions = shape[:-1].numel()
    size = max(positions * chunk_size // shape[-1], 1)
    starts = range(0, max(positions, 1), size)
    return torch.cat([_kl(*pair(slice(start, start + size))) for start in starts]).reshape(shape[:-1])


def _kl(a: Tensor, b: Tensor) -> Tensor:
    """``sum p (log p - log q)`` of logits ``[N, V]``."""
    a, b = upcast_half(a).log_softmax(-1), upcast_half(b).log_softmax(-1)
    possible, ref_possible = a != -torch.inf, b != -torch.inf
    gap = (a - b).masked_fill(~(possible & ref_possible), 0)
    kl = (a.exp() * gap).sum(-1).clamp_min(0)
    return kl.masked_fill((possible & ~ref_possible).any(-1) & ~kl.isnan(), torch.inf)
