"""Muon for the matrices of a trunk, AdamW for everything else, behind the face of one optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from torchrl_lang.training.optim import adamw

__all__ = ["MuonAdamW", "muon_adamw"]


class MuonAdamW(Optimizer):
    """Two optimisers that step together. Schedulers and checkpoints see their groups as one list.

    Args:
        muon: optimises some parameters.
        adamw: optimises the others.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self.parts = (muon, adamw)
        super().__init__([{"params": group["params"]} for part in self.parts for group in part.param_groups], {})
        # The very dictionaries of the parts: a scheduler that changes a learning rate changes it where it counts.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both."""
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """States of both, by name."""
        return {name: part.state_dict() for name, part in zip(("muon", "adamw"), self.parts, strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states of both."""
        for name, part in zip(("muon", "adamw"), self.parts, strict=True):
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
) -> MuonAdamW:
    """Muon (https://kellerjordan.github.io/posts/muon) for two-dimensional weights that are no embeddings.

    On transformers trained from scratch it needs far fewer steps than AdamW alone; in the Wordle recipes about half.
    Embeddings, biases, norms and stacked value heads go to :func:`~torchrl_lang.training.adamw`.

    Args:
        modules: a loss module, or the modules to train.
        lr: AdamW's learning rate.
        muon_lr: Muon's, ten times ``lr`` by default: its updates are orthogonal matrices, not unit steps.
        momentum: Muon's.
        weight_decay: of the matrices.
        betas: AdamW's.

    Raises:
        ValueError: there is no matrix for Muon.

    Examples:
        >>> import torch
        >>> from torchrl_lang.training import muon_adamw
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2))
        >>> optimizer = muon_adamw(model, 1e-3)
        >>> [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
        [(1, 0.01), (2, 0.001)]
    """
    whole = adamw(modules, lr, weight_decay=weight_decay, betas=betas)
    embeddings = {id(p) for p in _embeddings(modules)}
    matrices = [p for group in whole.param_groups for p in group["params"] if p.ndim == 2 and id(p) not in embeddings]
    if not matrices:
        raise ValueError("There is no two-dimensional weight for Muon: use adamw().")
    chosen = {id(p) for p in matrices}
    for group in whole.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in chosen]
    whole.param_groups = [group for group in whole.param_groups if group["params"]]
    rate = 10 * lr if muon_lr is None else muon_lr
    return MuonAdamW(Muon(matrices, lr=rate, momentum=momentum, weight_decay=weight_decay), whole)


def _embeddings(modules: nn.Module | Iterable[nn.Module]) -> list[Tensor]:
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    layers = [layer for root in roots for layer in root.modules()]
    return [layer.weight for layer in layers if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag))]
