"""A fast decoding step for GPT-2: one or a few tokens of each row, on the model's own weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from transformers import GPT2Config
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block, GPT2Model
from transformers.pytorch_utils import Conv1D

from torchrl_lang.functional.fast_linear import onednn_linear, uses_onednn
from torchrl_lang.modules.decoding.cache import RowCache, scores
from torchrl_lang.modules.fast_layers import FastConv1D
from torchrl_lang.modules.trunk import Trunk

_KINDS: Any = (GPT2Model, GPT2Block, GPT2Attention, GPT2MLP, Conv1D, FastConv1D, nn.Embedding, nn.LayerNorm, nn.Dropout)
_FORWARDS = {kind: kind.forward for kind in _KINDS}

# Sizes up to this many numbers use preallocated memory; whole prompts of many rows need more.
_REUSED = 1 << 22


def fast_gelu(x: Tensor, buffer: Tensor) -> Tensor:
    """GELU in its tanh approximation (arXiv 1606.08415), by ``x (1 + tanh u) / 2 = x sigmoid(2u)``.

    PyTorch's takes twice as long on a CPU; it is used on other devices and for lower precision. May write into
    ``buffer``, which has the shape of ``x``.
    """
    if not x.is_cpu or x.dtype not in (torch.float32, torch.float64):
        return F.gelu(x, approximate="tanh")
    slope = math.sqrt(8 / math.pi)
    u = torch.addcmul(x.new_full((), slope), x, x, value=0.044715 * slope, out=buffer).mul_(x)
    return u.sigmoid_().mul_(x)


_ACTIVATIONS: dict[type, Callable[[Tensor, Tensor], Tensor]] = {
    NewGELUActivation: fast_gelu,
    GELUTanh: fast_gelu,
    GELUActivation: lambda x, buffer: F.gelu(x),
    nn.ReLU: lambda x, buffer: x.relu_(),
}


class GPT2Step:
    """Computes :meth:`RowCache.extend` for one token of each row with fewer and cheaper operations.

    Equal to the model up to rounding. If there are several tokens per row, the last layer computes only the requested
    ones. The step holds the model's weights at construction: it is valid until a :class:`WeightSnapshot` detects a
    change, and while :meth:`accepts` is true.
    """

    def __init__(self, trunk: Trunk) -> None:
        model: Any = trunk.model
        self.compiled = trunk.compiled
        self.tokens, self.positions = model.wte.weight, model.wpe.weight
        self._trunk = trunk
        self.blocks = [_Block(block) for block in model.h]
        self.final_norm = _norm(model.ln_f)
        self._buffers: dict[tuple[str, int], Tensor] = {}

    @staticmethod
    def accepts(trunk: Trunk) -> bool:
        """Whether the trunk's model is a plain GPT-2 in evaluation mode, without hooks or adapters, and not sharded."""
        model: Any = trunk.model
        if trunk.sharded_root is not None or type(trunk) is not Trunk or type(model) is not GPT2Model:
            return False
        sdpa = model.config._attn_implementation == "sdpa" and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
        # What others have put in place of a method is used: before this file was imported, or since.
        own = all(kind.forward is f and f.__module__ == kind.__module__ for kind, f in _FORWARDS.items())
        if not (sdpa and own):
            return False
        # Models with other parts (adapters, quantised layers, cross attention) use their own code.
        kinds = ((name, type(part)) for name, part in model.named_modules())
        built = [(name, Conv1D if kind is FastConv1D else kind) for name, kind in kinds]
        expected = _parts(model.config.n_layer, model.config.activation_function)
        if built != expected or not all(map(_plain, model.modules())):
            return False
        parameters = list(model.parameters())
        return len({(type(p), p.dtype, p.device) for p in parameters}) == 1 and type(parameters[0]) is nn.Parameter

    def applies(self, tokens: Tensor) -> bool:
        """Whether the step can replace the model now: no gradients, no autocast, no hooks on all modules.

        Single tokens of a compiled trunk use the compiled model.
        """
        if self.compiled and tokens.shape[1] == 1:
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self.tokens.device.type):
            return False
        return not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)

    def __call__(
        self,
        cache: RowCache,
        tokens: Tensor,
        positions: Tensor | None,
        visible: int | None,
        last: Tensor,
        *,
        rows: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Add tokens to the cache as :meth:`RowCache.extend` does; the states of one token of each row.

        Returns:
            ``hidden`` ``[N, H]`` at the indices ``last`` (int64 ``[N]``).
        """
        n, q = tokens.shape[:2]
        slots = cache.expect(tokens, positions, visible, rows=rows)
        mask = None if positions is None else scores(positions, slots, self.tokens.dtype)
        place = torch.arange(q, device=tokens.device).expand(n, q) if positions is None else positions
        embedded = tokens
        if not tokens.is_floating_point():
            embedded = self._trunk.embed(tokens, embedding=lambda ids: F.embedding(ids, self.tokens))
        position = F.embedding(place if position_ids is None else position_ids, self.positions)
        x = embedded.add_(position).flatten(0, 1)  # [N q, H]
        for i, block in enumerate(self.blocks):
            query, keys, values = block.project(x, n, self._buffer)
            keys, values = cache.update(keys, values, i)
            if q > 1 and i == len(self.blocks) - 1:  # only the requested tokens are needed from here
                row = torch.arange(n, device=tokens.device)
                x, query = x.view(n, q, -1)[row, last], query[row, :, last].unsqueeze(2)
                mask = scores(place[row, last].unsqueeze(-1), keys.shape[2], x.dtype)
            x = block.finish(x, query, keys, values, mask, self._buffer)
        return F.layer_norm(x, *self.final_norm)

    def _buffer(self, name: str, rows: int, width: int) -> Tensor:
        """Reused memory for ``[rows, width]`` numbers, because mapping new pages costs as much as the computation."""
        if rows * width > _REUSED:
            return self.tokens.new_empty(rows, width)
        found = self._buffers.get((name, width))
        if found is None or found.shape[0] < rows:
            found = self._buffers[name, width] = self.tokens.new_empty(rows, width)
        return found[:rows]


_Buffer = Callable[[str, int, int], Tensor]


class _Layer:
    """A linear layer's weights; its outputs are written into reused memory, or by oneDNN into new one."""

    def __init__(self, layer: Conv1D) -> None:
        self.weight, self.bias, self.fast = layer.weight, layer.bias, type(layer) is FastConv1D

    def __call__(self, x: Tensor, buffer: _Buffer, name: str) -> Tensor:
        if self.fast and uses_onednn(x, self.weight.mT, self.bias):
            return onednn_linear(x, self.weight.mT, self.bias)
        return torch.addmm(self.bias, x, self.weight, out=buffer(name, x.shape[0], self.weight.shape[1]))


class _Block:
    """One layer's weights."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.attn, block.mlp
        self.heads, self.scaling = attention.num_heads, attention.scaling
        self.norm_1, self.norm_2 = _norm(block.ln_1), _norm(block.ln_2)
        layers = (attention.c_attn, attention.c_proj, mlp.c_fc, mlp.c_proj)
        self.into, self.out, self.up, self.down = map(_Layer, layers)
        self.activation = _ACTIVATIONS[type(mlp.act)]

    def project(self, x: Tensor, n: int, buffer: _Buffer) -> tuple[Tensor, ...]:
        """Queries, keys and values, ``[N q, H] -> [N, heads, q, D]``."""
        out = self.into(F.layer_norm(x, *self.norm_1), buffer, "attention")
        return out.view(n, -1, 3, self.heads, x.shape[-1] // self.heads).permute(2, 0, 3, 1, 4).unbind(0)

    def finish(
        self, x: Tensor, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, buffer: _Buffer
    ) -> Tensor:
        """Attention and MLP, ``[N q, H] -> [N q, H]``; writes into ``x``."""
        causal = mask is None and query.shape[2] > 1
        seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal, scale=self.scaling)
        x = x.add_(self.out(seen.transpose(1, 2).reshape(x.shape), buffer, "out"))
        inner = self.up(F.layer_norm(x, *self.norm_2), buffer, "inner")
        inner = self.activation(inner, buffer("activation", *inner.shape))
        return x.add_(self.down(inner, buffer, "out"))


def _norm(norm: Any) -> tuple[Any, ...]:
    """Arguments of :func:`torch.nn.functional.layer_norm`."""
    return norm.normalized_shape, norm.weight, norm.bias, norm.eps


@cache
def _parts(layers: int, activation: str) -> list[tuple[str, type]]:
    """Names and classes of the modules of a model as Hugging Face builds it; none for an unknown activation."""
    with torch.device("meta"):
        model = GPT2Model(GPT2Config(n_embd=2, n_layer=layers, n_head=1, activation_function=activation))
    known = type(model.h[0].mlp.act) in _ACTIVATIONS if layers else False
    return [(name, type(part)) for name, part in model.named_modules()] if known else []


def _plain(module: nn.Module) -> bool:
    """Whether a module is in evaluation mode, without wrappers and hooks."""
    own: Any = vars(module)
    hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]
    replaced = "forward" in own or own.get("_compiled_call_impl") or own.get("max_norm")
    return not (module.training or hooked or replaced)
