"""A linear layer in float32 on x86 CPUs by oneDNN, which takes half the time of MKL on an AMD EPYC."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN where torch would use MKL: in float32 on an x86 CPU.

    MKL leaves AVX-512 unused on AMD's processors, oneDNN does not and takes half the time on an EPYC. Results have
    float32 accuracy and are not those of MKL to the last digit. Elsewhere, for small products, under autocast,
    compilers, transforms of functions and forward-mode gradients, and with ``torch.backends.mkldnn.enabled = False``,
    this is :func:`torch.nn.functional.linear`, which also raises the errors.

    Args:
        x: float ``[*B, F]``.
        weight: float ``[V, F]``.
        bias: float ``[V]``; None for no bias.

    Returns:
        Float ``[*B, V]``, with gradients of any order.

    Examples:
        >>> import torch
        >>> from torchrl_lang.functional.fast_linear import fast_linear
        >>> fast_linear(torch.ones(1024, 64), torch.ones(256, 64), torch.ones(256)).unique()
        tensor([65.])
    """
    return onednn_linear(x, weight, bias) if uses_onednn(x, weight, bias) else F.linear(x, weight, bias)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """:func:`fast_linear` where :func:`uses_onednn` holds, which is not checked again."""
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    product = _Linear.apply if differentiable else _product
    if x.ndim == 2:
        return product(x, weight, bias)
    # No view, as torch's result is none: one made without gradients may not be written to with them, and FSDP warns.
    return torch.ops.aten._unsafe_view(product(x.flatten(0, -2), weight, bias), (*x.shape[:-1], weight.shape[0]))


def uses_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`fast_linear` computes this product by oneDNN."""
    return (
        not torch.compiler.is_compiling()
        and _AVAILABLE
        and isinstance(x, Tensor)  # not a node of a graph that torch.fx traces
        and weight.ndim == 2
        and _large_product(x, weight)  # most calls of small models end here
        and _plain(x)
        and _plain(weight)
        and (bias is None or _plain(bias))
        and x.ndim > 1
        and x.numel() > 0
        and weight.shape[1] == x.shape[-1]
        and _has_dense_lines(weight)
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and not _observed()
    )


def _large_product(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN saves more than its call costs: with many multiplications, or weights from beyond the cache."""
    return weight.numel() > _LARGE_WEIGHT or x.numel() * weight.shape[0] >= _MANY_PRODUCTS


_AVAILABLE = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def _plain(t: Tensor) -> bool:
    """Whether a tensor is of float32 in a CPU's memory: neither sharded, quantized, sparse, fake nor batched."""
    return (
        type(t) in (Tensor, nn.Parameter)
        and t.dtype == torch.float32
        and torch._C._dispatch_keys(t).raw_repr() in _PLAIN_KEYS
    )


def _keys(inference: bool) -> int:
    with torch.inference_mode(inference):
        return torch._C._dispatch_keys(torch.empty(0, device="cpu")).raw_repr()


_PLAIN_KEYS = (_keys(False), _keys(True))
_LARGE_WEIGHT = 2**16
_MANY_PRODUCTS = 2**21
_FEW = 64  # columns, such as those of an adapter


def _has_dense_lines(matrix: Tensor) -> bool:
    """Whether the rows or the columns of a matrix are contiguous and do not overlap: oneDNN reads no others."""
    (rows, columns), (down, along) = matrix.shape, matrix.stride()
    return (along == 1 and down >= columns) or (down == 1 and along >= rows)


def _observed() -> bool:
    """Whether a mode follows operations one by one and has rules for torch's own alone, as forward gradients do."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.transposed = not weight.is_contiguous()
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_weight = None
        if of_weight:
            # In the weight's order in memory, as autograd copies any other; but products with few columns are slow.
            rows, columns = grad.shape[1], x.shape[1]
            if ctx.transposed:
                rows, columns = columns, rows
            by_input = ctx.transposed != (columns < min(rows, _FEW))
            grad_weight = fast_linear(x.mT, grad.mT).mT if by_input else fast_linear(grad.mT, x.mT)
        return fast_linear(grad, weight.mT) if of_x else None, grad_weight, grad.sum(0) if of_bias else None
