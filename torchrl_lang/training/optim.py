"""Optimizers and learning-rate schedules for language models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR


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
    own = {id(p): rate for module, rate in rates for p in module.parameters() if p.requires_grad}
    if not own.keys() <= trained.keys() or min(own.values(), default=0) < 0:
        raise ValueError(f"rates need modules that are trained, and learning rates of at least 0: {rates}.")
    layers = [layer for module in modules for layer in module.modules()]
    kept = {id(layer.weight) for layer in layers if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
    # By name, too, because the stacked biases and norms of value heads have two and three dimensions.
    names = ((name.rpartition(".")[2], p) for module in modules for name, p in module.named_parameters())
    kept |= {id(p) for name, p in names if name.endswith("bias") or name.startswith("norm")}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {(lr, True): [], (lr, False): []}
    for key, p in trained.items():
        groups.setdefault((own.get(key, lr), p.ndim >= 2 and key not in kept), []).append(p)
    one_by_one = any(isinstance(p, DTensor) for p in trained.values())  # no kernel takes sharded and whole parameters
    if fused is None:
        kinds = (p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in trained.values())
        fused = not one_by_one and all(kinds)
    decay = {True: weight_decay, False: 0.0}
    listed = [{"params": p, "lr": rate, "weight_decay": decay[own]} for (rate, own), p in groups.items() if p]
    return AdamW(listed, lr=lr, betas=betas, eps=eps, fused=fused, foreach=False if one_by_one else None)


class MuonAdamW(Optimizer):
    """Two optimizers that step together. Schedulers and checkpoints use their parameter groups as one list.

    Args:
        muon: optimizes some parameters.
        adamw: optimizes the others. Its groups come first, so logs show their learning rate.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self.parts = (adamw, muon)
        super().__init__([{"params": group["params"]} for part in self.parts for group in part.param_groups], {})
        # The dictionaries are shared, so a scheduler that changes a learning rate changes the optimizer's.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both optimizers."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """States of both optimizers, by name."""
        return {name: part.state_dict() for name, part in zip(("adamw", "muon"), self.parts, strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of both optimizers."""
        for name, part in zip(("adamw", "muon"), self.parts, strict=True):
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def muon_adamw(
    modules: nn.Module | Iterable[nn.Module],
    lr: float,
    *,
    muon_lr: float | None = None,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.99),
    rates: Sequence[tuple[nn.Module, float]] = (),
) -> MuonAdamW:
    """Muon (https://kellerjordan.github.io/posts/muon) for the linear layers of a trunk, AdamW for all else.

    Transformers trained from scratch need far fewer steps than with AdamW alone, in the Wordle recipes about half.
    Embeddings, biases, norms and all heads (language-model and value heads) use
    :func:`~torchrl_lang.training.adamw`. If there is no Hugging Face model among the modules, all linear layers use
    Muon.

    Args:
        modules: a loss module, or the modules to train.
        lr: AdamW's learning rate.
        muon_lr: Muon's learning rate, by default ten times ``lr``, because its updates are orthogonal matrices.
        momentum: Muon's momentum.
        weight_decay: weight decay of matrices, for both optimizers.
        betas: AdamW's betas.
        rates: modules with their own learning rates, as in :func:`~torchrl_lang.training.adamw`; only for parameters
            that AdamW optimizes, such as heads.

    Raises:
        ValueError: there is no linear layer for Muon.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import muon_adamw
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2))
        >>> optimizer = muon_adamw(model, 1e-3)
        >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [(2, 0.001), (1, 0.01)]
    """
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    matrices = _linear_weights([layer for root in roots for layer in root.modules()])
    if not matrices:
        raise ValueError("Muon needs a linear layer inside a trunk, here is none: use adamw (--optimizer adamw).")
    rest = adamw(roots, lr, weight_decay=weight_decay, betas=betas, rates=rates)
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in matrices]
    rest.param_groups = [group for group in rest.param_groups if group["params"]]
    rate = 10 * lr if muon_lr is None else muon_lr
    return MuonAdamW(Muon(list(matrices.values()), lr=rate, momentum=momentum, weight_decay=weight_decay), rest)


def _linear_weights(layers: list[nn.Module]) -> dict[int, Tensor]:
    """Trainable weights of the linear layers inside the trunks, without embeddings, by identity."""
    from transformers import PreTrainedModel  # a local import, because it takes a second
    from transformers.pytorch_utils import Conv1D

    embeddings = {id(layer.weight) for layer in layers if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
    models = [layer for layer in layers if isinstance(layer, PreTrainedModel)]
    inside = {id(layer) for model in models for layer in model.base_model.modules()}
    linear = nn.Linear, Conv1D  # the latter is GPT-2's linear layer, transposed
    weights = [layer.weight for layer in layers if isinstance(layer, linear) and (not models or id(layer) in inside)]
    return {id(weight): weight for weight in weights if weight.requires_grad and id(weight) not in embeddings}


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
