"""A linear layer in float32 on x86 CPUs by oneDNN, which is fast on processors of every maker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN where torch would use MKL: in float32 on an x86 CPU.

    MKL uses AVX-512 on Intel's processors alone, oneDNN on all, so that it takes half the time on others. Results have
    float32 accuracy and are not those of MKL to the last digit. Elsewhere, under autocast, compilers and transforms of
    functions, and with ``torch.backends.mkldnn.enabled = False``, this is :func:`torch.nn.functional.linear`.

    Args:
        x: float ``[*B, F]``.
        weight: float ``[V, F]``.
        bias: float ``[V]``; None for no bias.

    Returns:
        Float ``[*B, V]``, with gradients of any order.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.fast_linear import fast_linear
        >>> fast_linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([5.0]))
        tensor([[16.]])
    """
    if not _applies(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    return _product(x, weight, bias)


def _applies(x: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or not (x.is_cpu and x.dtype == weight.dtype == torch.float32):
        return False
    return (
        x.ndim > 1
        and x.numel() > 0
        and type(weight) in (Tensor, nn.Parameter)  # neither sharded nor quantized
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            fast_linear(grad, weight.mT) if of_x else None,
            fast_linear(rows.mT, x.flatten(0, -2).mT) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )
