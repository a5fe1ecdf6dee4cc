"""The terms of proximal policy optimisation (PPO, arXiv 1707.06347) as functions of tensors, one decision a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.objectives.utils import distance_loss

from torchrl_lang.functional import kl_estimate, masked_mean
from torchrl_lang.functional.kl import KLEstimator

__all__ = ["clipped_objective", "corrected_kl", "effective_sample_size", "explained_variance", "value_loss"]


def clipped_objective(log_ratio: Tensor, advantage: Tensor, clip_epsilon: tuple[float, float]) -> Tensor:
    """``-min(rho A, clip(rho, 1 - low, 1 + high) A)`` (arXiv 1707.06347, eq. 7), elementwise.

    ``log_ratio`` is ``log rho = log pi(a) - log b(a)``, ``b`` the policy that acted, ``clip_epsilon`` ``(low, high)``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.objectives.ppo_terms import clipped_objective
        >>> log_ratio = torch.tensor([2.0, 2.0, 0.5, 0.5]).log()
        >>> clipped_objective(log_ratio, torch.tensor([1.0, -1.0, 1.0, -1.0]), (0.2, 0.2))
        tensor([-1.2000,  2.0000, -0.5000,  0.8000])
    """
    low, high = clip_epsilon
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def value_loss(
    value: Tensor, target: Tensor, kind: str, old_value: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Distance of value and target; with ``clip`` the larger one of it and that of ``old + clamp(value - old)``.

    ``kind`` is ``"l2"``, ``"l1"`` or ``"smooth_l1"``, as TorchRL's losses have them. With ``clip``, how far a value may
    move before it gains nothing by moving on, ``old_value`` is the value before training on the batch. All ``[N]``.

    Examples:
        >>> import torch
        >>> from torchrl_lang.objectives.ppo_terms import value_loss
        >>> value_loss(torch.tensor([1.0]), torch.tensor([1.5]), "l2", torch.tensor([0.0]), clip=0.5)
        tensor([1.])
    """
    loss = distance_loss(target, value, loss_function=kind)
    if clip is None or old_value is None:
        return loss
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, distance_loss(target, near, loss_function=kind))


def corrected_kl(log_ratio: Tensor, log_prob: Tensor, ref_log_prob: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """``rho * k(log pi, log ref)``: ``KL(pi || ref)`` from what another policy did, with its exact gradient.

    The importance weight ``rho = pi / b`` makes the mean over samples of ``b`` that over ``pi``, and its gradient joins
    that of the estimate: ``E_b[rho k] = sum_a pi(a) k(a)``, differentiated through every ``pi``. With k1 and k3 that is
    the divergence of one decision and its exact gradient, with k2 ``E_pi[log(pi / ref)**2] / 2``. k3 varies less near
    the reference, and needs a policy that gives probability to all tokens that the reference can sample. The weight is
    not clipped.

    Args:
        log_ratio: ``log rho``, float ``[N]``.
        log_prob: ``log pi`` of what was done, float ``[N]``; ``-inf`` where ``pi`` no longer samples it, which adds 0.
        ref_log_prob: ``log ref`` of the same, float ``[N]``.
        estimator: see :func:`~torchrl_lang.functional.kl_estimate`.

    Examples:
        >>> import torch
        >>> from torchrl_lang.objectives.ppo_terms import corrected_kl
        >>> pi, ref, b = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.9])
        >>> kl = (pi * (pi / ref).log()).sum()
        >>> torch.testing.assert_close((b * corrected_kl((pi / b).log(), pi.log(), ref.log())).sum(), kl)
    """
    possible = log_prob.isfinite()
    ratio = torch.where(possible, log_ratio, -torch.inf).exp()
    # Where the token has no probability both are zero, and so are the estimate and its gradient.
    return ratio * kl_estimate(
        torch.where(possible, log_prob, 0.0), torch.where(possible, ref_log_prob, 0.0), estimator
    )


def effective_sample_size(log_ratio: Tensor, counted: Tensor) -> Tensor:
    """``(sum rho)**2 / (n sum rho**2)`` over what counts, in ``(0, 1]``: 1 where all weigh alike, 0 where none is.

    Examples:
        >>> import torch
        >>> from torchrl_lang.objectives.ppo_terms import effective_sample_size
        >>> effective_sample_size(torch.tensor([1.0, 3.0, 9.0]).log(), torch.tensor([True, True, False]))
        tensor(0.8000)
    """
    weights = torch.where(counted, log_ratio, -torch.inf)
    size = (2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)).exp()
    return torch.where(counted.any(), size / counted.sum().clamp_min(1), 0.0)


def explained_variance(value: Tensor, target: Tensor, counted: Tensor) -> Tensor:
    """``1 - Var(target - value) / Var(target)`` over what counts; 0 where the targets do not vary.

    Examples:
        >>> import torch
        >>> from torchrl_lang.objectives.ppo_terms import explained_variance
        >>> explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([True, True]))
        tensor(0.7500)
    """
    rest, whole = (_variance(x, counted) for x in (target - value, target))
    return torch.where(whole > 0, 1 - rest / whole.clamp_min(torch.finfo(whole.dtype).tiny), 0.0)


def _variance(values: Tensor, counted: Tensor) -> Tensor:
    return masked_mean((values - masked_mean(values, counted)).square(), counted)
