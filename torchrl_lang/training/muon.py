"""Muon for the weight matrices of a trunk and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torchrl_lang.training.optim import adamw

__all__ = ["MuonAdamW", "muon_adamw"]


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
        raise ValueError("There is no weight of a linear layer for Muon: use adamw().")
    rest = adamw(roots, lr, weight_decay=weight_decay, betas=betas, rates=rates)
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in matrices]
    rest.param_groups = [group for group in rest.param_groups if group["params"]]
    rate = 10 * lr if muon_lr is None else muon_lr
    return MuonAdamW(Muon(list(matrices.values()), lr=rate, momentum=momentum, weight_decay=weight_decay), rest)


def _linear_weights(layers: list[nn.Module]) -> dict[int, Tensor]:
    """Trainable weights of the linear layers inside the trunks, without embeddings, by identity."""
    embeddings = {id(layer.weight) for layer in layers if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))}
    models = [layer for layer in layers if isinstance(layer, PreTrainedModel)]
    inside = {id(layer) for model in models for layer in model.base_model.modules()}
    linear = nn.Linear, Conv1D  # the latter is GPT-2's linear layer, transposed
    weights = [layer.weight for layer in layers if isinstance(layer, linear) and (not models or id(layer) in inside)]
    return {id(weight): weight for weight in weights if weight.requires_grad and id(weight) not in embeddings}
