"""Optimizers and learning-rate schedules for language models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["adamw", "warmup_cosine"]


def adamw(
    modules: nn.Module | Iterable[nn.Module],
    lr: float,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    fused: bool | None = None,
    rates: Sequence[tuple[nn.Module, float]] = (),
) -> AdamW:
    """AdamW (arXiv 1711.05101) with weight decay on matrices only, not on biases, norms or embeddings.

    A parameter that several modules share is used once; an embedding that is also an output layer counts as embedding.
    Frozen parameters, such as a loss module's targets, are skipped.

    Args:
        modules: a loss module, or the modules to train.
        lr: learning rate.
        weight_decay: weight decay of matrices.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        fused: use one kernel for all parameters; by default if all of them are on a CPU or a CUDA device.
        rates: modules with their own learning rates, such as a value head beside a trunk with a smaller rate.

    Raises:
        ValueError: there is nothing to train, a module in ``rates`` is not among the trained ones, or a rate is
            negative.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import adamw
        >>> optimizer = adamw(torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)), 1e-3)
        >>> [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in optimizer.param_groups]
        [(0.01, [(2, 3)]), (0.0, [(5, 3), (2,)])]
    """
    modules = [modules] if isinstance(modules, nn.Module) else list(modules)
    trained = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    if not trained:
        raise ValueError("These modules have no parameter that requires a gradient.")
    layers = [layer for module in modules for layer in module.modules()]
    kept = {id(layer.weight) for layer in layers if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
    # By name, too, because the stacked biases and norms of value heads have two and three dimensions.
    kept |= {id(p) for module in modules for name, p in module.named_parameters() if _is_bias_or_norm(name)}
    own = _own_rates(rates, trained)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(lr, True): [], (lr, False): []}
    for key, p in trained.items():
        groups.setdefault((own.get(key, lr), p.ndim >= 2 and key not in kept), []).append(p)
    if fused is None:
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained.values())
    return AdamW(
        [
            {"params": params, "lr": rate, "weight_decay": weight_decay if decays else 0.0}
            for (rate, decays), params in groups.items()
            if params
        ],
        lr=lr,
        betas=betas,
        eps=eps,
        fused=fused,
    )


def _own_rates(rates: Sequence[tuple[nn.Module, float]], trained: Mapping[int, nn.Parameter]) -> dict[int, float]:
    """Learning rates by parameter."""
    found = {id(p): rate for module, rate in rates for p in module.parameters() if p.requires_grad}
    if any(rate < 0 for rate in found.values()):
        raise ValueError(f"A learning rate must not be negative, got {min(found.values())}.")
    if not found.keys() <= trained.keys():
        raise ValueError("A module in rates has parameters that are not among those to train.")
    return found


def _is_bias_or_norm(name: str) -> bool:
    own = name.rpartition(".")[2]
    return own.endswith("bias") or own.startswith("norm")


def warmup_cosine(optimizer: Optimizer, steps: int, *, warmup: int = 0, final: float = 0.1) -> LambdaLR:
    """A learning rate that rises linearly for ``warmup`` steps, then decays as half a cosine until step ``steps``.

    Args:
        optimizer: its learning rates are the peak.
        steps: total number of steps; later steps keep the final rate.
        warmup: step ``i`` of the warmup has ``(i + 1) / warmup`` of the peak, so the first rate is not zero.
        final: final rate as a fraction of the peak.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import warmup_cosine
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler, rates = warmup_cosine(optimizer, 6, warmup=2, final=0.0), []
        >>> for _ in range(6):
        ...     rates.append(round(scheduler.get_last_lr()[0], 3))
        ...     optimizer.step(); scheduler.step()
        >>> rates
        [0.5, 1.0, 1.0, 0.75, 0.25, 0.0]
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must be at least 0 and less than steps={steps}, got {warmup}.")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(steps - 1 - warmup, 1), 1.0)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
