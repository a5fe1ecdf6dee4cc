"""Small networks with stacked weights, the base of all value heads."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_lang._checks import one_of
from torchrl_lang.modules.trunk import HIDDEN, HIDDEN_PRE_NORM

__all__ = ["OUT_STD", "HeadKind", "StackedHeads", "cast_like"]

HeadKind = Literal["mlp", "residual", "deep"]

OUT_STD = 0.01
"""Standard deviation of the initial weights of a last layer."""


class StackedHeads(nn.Module):
    """``n`` small networks of the same shape with stacked weights, ``hidden [N, H] -> [n, N, out]``.

    ``"mlp"``: ``Linear(H, 2H)``, ReLU, ``Linear(2H, out)``, read from ``hidden``.
    ``"residual"``: ``Linear(LN2(x + dropout(W2 gelu(W1 LN1(x)))))`` with inner width ``4H``, read from
    ``hidden_pre_norm``.
    ``"deep"``: two hidden layers ``relu(LN(W x))`` of width ``2H``, then ``Linear(2H, out)``, read from ``hidden``; the
    heads of AgileRL.

    States are cast to the dtype of the weights, so heads in float32 over a model in half precision (the usual choice)
    compute values in float32. Under autocast everything runs in its precision.

    First layers are initialized like :class:`torch.nn.Linear`. The last layer begins with small weights (normal,
    0.01) and zero bias, so that initial values and their bootstrapped targets are near zero.
    """

    def __init__(self, width: int, n: int, out: int, kind: HeadKind, dropout: float) -> None:
        super().__init__()
        one_of("kind", kind, ("mlp", "residual", "deep"))
        for name, size in (("width", width), ("the number of heads", n), ("the number of outputs", out)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{type(self).__name__}: {name} must be an integer of at least 1, got {size!r}.")
        self.kind = kind
        inner, features = (4 * width, width) if kind == "residual" else (2 * width, 2 * width)
        self.in_weight = _linear_init(n, inner, width)
        self.in_bias = _linear_init(n, inner, fan_in=width)
        if kind != "mlp":
            self.norm1_weight = nn.Parameter(torch.ones(n, 1, features))
            self.norm1_bias = nn.Parameter(torch.zeros(n, 1, features))
            self.mid_weight = _linear_init(n, features, inner)
            self.mid_bias = _linear_init(n, features, fan_in=inner)
            self.norm2_weight = nn.Parameter(torch.ones(n, 1, features))
            self.norm2_bias = nn.Parameter(torch.zeros(n, 1, features))
        self.dropout = nn.Dropout(dropout)
        self.out_weight = nn.Parameter(torch.empty(n, out, features).normal_(0.0, OUT_STD))
        self.out_bias = nn.Parameter(torch.zeros(n, out))

    @property
    def width(self) -> int:
        """``H``, the width of the states."""
        return self.in_weight.shape[-1]

    @property
    def in_key(self) -> str:
        """The key of the trunk's states that these heads read."""
        return HIDDEN_PRE_NORM if self.kind == "residual" else HIDDEN

    def config(self) -> dict[str, Any]:
        """Arguments that build a head of the same shape."""
        return {"width": self.width, "kind": self.kind, "dropout": self.dropout.p}

    def features(self, hidden: Tensor) -> Tensor:
        """Input of the last layer, ``[N, H] -> [n, N, F]``."""
        n, inner, _ = self.in_weight.shape
        hidden = cast_like(hidden, self.in_weight)
        if self.kind == "mlp":
            first = F.linear(hidden, self.in_weight.flatten(0, 1), self.in_bias.flatten())  # all heads in one product
            return first.relu().unflatten(-1, (n, inner)).transpose(0, 1)
        if self.kind == "deep":
            x = torch.baddbmm(self.in_bias.unsqueeze(1), hidden.expand(n, -1, -1), self.in_weight.mT)
            x = torch.baddbmm(self.mid_bias.unsqueeze(1), self._norm1(x).relu(), self.mid_weight.mT)
            return self._norm2(x).relu()
        x = self._norm1(hidden)  # [n, N, H]
        x = torch.baddbmm(self.in_bias.unsqueeze(1), x, self.in_weight.mT)
        x = torch.baddbmm(self.mid_bias.unsqueeze(1), F.gelu(x), self.mid_weight.mT)
        return self._norm2(hidden + self.dropout(x))

    def _norm1(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.norm1_weight + self.norm1_bias

    def _norm2(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.norm2_weight + self.norm2_bias

    def outputs(self, hidden: Tensor) -> Tensor:
        """Output of the last layer, ``[N, H] -> [n, N, out]``."""
        return torch.baddbmm(self.out_bias.unsqueeze(1), self.features(hidden), self.out_weight.mT)


def cast_like(states: Tensor, weight: Tensor) -> Tensor:
    """Cast states to the dtype of a weight; under autocast, which casts both, they are not changed."""
    return states if torch.is_autocast_enabled(states.device.type) else states.to(weight.dtype)


def _linear_init(*shape: int, fan_in: int | None = None) -> nn.Parameter:
    bound = (fan_in or shape[-1]) ** -0.5
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))
