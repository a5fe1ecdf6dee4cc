"""Hugging Face models: evaluation mode, causality, heads, attention windows and PEFT adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrl.envs.utils import ExplorationType, exploration_type

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside a ``with`` block, then restore the mode of every submodule."""
    training = [m for m in module.modules() if m.training]
    try:
        for m in training:
            m.training = False
        yield
    finally:
        for m in training:
            m.training = True


def is_stochastic() -> bool:
    """Whether policies sample their actions here, by TorchRL's ``set_exploration_type``, or decode greedily."""
    return exploration_type() not in (ExplorationType.DETERMINISTIC, ExplorationType.MODE, ExplorationType.MEAN)


_LENGTH = 8
# Relative difference of states that counts as rounding. New bidirectional models of a few units differ by at least
# 2e-3, trained ones by far more. Causal models do not differ, unless kernels depend on the tokens, as with experts.
_ROUNDING, _HALF_ROUNDING = 1e-4, 1.5e-3

_checked: WeakSet[nn.Module] = WeakSet()
_plain_heads: WeakSet[nn.Module] = WeakSet()


def check_causal(lm: PreTrainedModel) -> None:
    """Raise ValueError if a token's state depends on later tokens.

    Runs the model once, in evaluation mode and without gradients, on two short rows with a common beginning; further
    calls with the same model do nothing. It uses no random numbers. Models that cannot run where they are (on the meta
    device, sharded over processes, without their kernels) are not checked.

    Examples:
        >>> from transformers import AutoConfig, AutoModel
        >>> from torchrl_lang.modules.hugging_face import check_causal
        >>> shape = {"vocab_size": 9, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
        >>> check_causal(AutoModel.from_config(AutoConfig.for_model("gpt2", **shape)))
        >>> check_causal(AutoModel.from_config(AutoConfig.for_model("bert", **shape, intermediate_size=8)))
        Traceback (most recent call last):
            ...
        ValueError: BertModel is not causal: a token's state changes with those after it. ...
    """
    if lm.base_model in _checked:
        return
    found = _change_by_later_tokens(lm.base_model)
    if found is None:
        return
    if found > (_HALF_ROUNDING if lm.dtype.itemsize < 4 else _ROUNDING):
        name, advice = type(lm.base_model).__name__, "Use one such as 'gpt2', 'llama' or 'qwen2'"
        raise ValueError(f"{name} is not causal: a token's state changes with those after it. {advice}.")
    _checked.add(lm.base_model)


def _change_by_later_tokens(model: PreTrainedModel) -> float | None:
    """The relative difference between the states of tokens that others follow; None if the model cannot run here."""
    if (tokens := _short_rows(model)) is None:
        return None
    alike = tokens.shape[1] // 2
    tokens[0, alike:], tokens[1, alike:] = 0, 1
    try:
        one, other = _of_short_rows(model, tokens).last_hidden_state[:, :alike].double()
    except RuntimeError:
        return None
    return float((one - other).abs().mean() / one.abs().mean().clamp_min(1e-30))


def _short_rows(model: PreTrainedModel) -> Tensor | None:
    """Two rows of the first two tokens; None if the model cannot read them or is sharded."""
    weight = model.get_input_embeddings().weight
    length = min(_LENGTH, positions(model.config) or _LENGTH)
    # A forward pass of a part of a sharded model would make this part its root.
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()) or min(weight.shape[0], length) < 2:
        return None
    return torch.arange(length, device=weight.device).remainder(2).expand(2, length).clone()


def _of_short_rows(model: PreTrainedModel, tokens: Tensor) -> Any:
    embedding = model.get_input_embeddings()
    with torch.no_grad(), eval_mode(model), torch.autocast(tokens.device.type, enabled=False):
        return model.forward(inputs_embeds=embedding(tokens), use_cache=False)  # hooks on the model are its caller's


def trunk_obstacle(lm: PreTrainedModel) -> str | None:
    """Why a model is not one of text alone with a decoder alone, in words; None if it is."""
    obstacles = {
        "has an encoder": getattr(lm.config, "is_encoder_decoder", False),
        "reads more than text": not hasattr(lm.config, "hidden_size"),
        "does not name its trunk": lm.base_model is lm and lm.get_output_embeddings() is not None,
        "does not name its embeddings": not _names_embeddings(lm.base_model),
    }
    return next((obstacle for obstacle, holds in obstacles.items() if holds), None)


def _names_embeddings(model: PreTrainedModel) -> bool:
    try:
        return model.get_input_embeddings() is not None
    except NotImplementedError:  # as of BART's decoder alone
        return False


def hidden_size(config: PreTrainedConfig) -> int:
    """``H``, the width of the states that the head reads."""
    return int(getattr(config, "word_embed_proj_dim", None) or config.hidden_size)


def positions(config: PreTrainedConfig) -> int | None:
    """Number of positions of a model, None if unlimited."""
    found = getattr(config, "max_position_embeddings", None)
    return found if found and found > 0 else None


class ScaledHead(nn.Module):
    """A linear head whose logits are scaled and then capped, as in Cohere, Granite and Gemma 2: ``c tanh(s W h / c)``.

    Args:
        linear: ``hidden [*N, H] -> logits [*N, V]``.
        scale: ``s``.
        cap: ``c``; None caps nothing.
    """

    def __init__(self, linear: Any, scale: float, cap: float | None) -> None:
        super().__init__()
        self.linear, self.scale, self.cap = linear, scale, cap
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, hidden: Tensor) -> Tensor:
        """``[*N, H] -> [*N, V]``."""
        return self.change(self.linear(hidden))

    def change(self, logits: Tensor) -> Tensor:
        """The logits ``[*N, V]`` scaled and capped."""
        logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def inner_linear(head: Any) -> Any:
    """The linear layer of a :class:`ScaledHead`; other heads are returned unchanged."""
    return head.linear if isinstance(head, ScaledHead) else head


_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # the sign of the exponent
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def language_head(lm: PreTrainedModel) -> nn.Module | None:
    """The head of a model, ``hidden -> logits``, by its configuration; None if it has none."""
    linear: Any = lm.get_output_embeddings()
    scale = math.prod((getattr(lm.config, name, None) or 1) ** sign for name, sign in _SCALES.items())
    cap = next((cap for name in _CAPS if (cap := getattr(lm.config, name, None))), None)
    return linear if linear is None or (scale, cap) == (1, None) else ScaledHead(linear, scale, cap)


def head_obstacle(lm: PreTrainedModel, head: nn.Module | None) -> str | None:
    """Why the logits of a model are not those of a :func:`language_head`, in words; None if they are.

    Runs the model, as :func:`check_causal` does, with other numbers in place of what the linear layer computes. A model
    that cannot run where it is counts as one whose logits are.
    """
    if head is None:
        return "it has no language-model head"
    linear: Any = lm.get_output_embeddings()
    if lm in _plain_heads or (tokens := _short_rows(lm)) is None:
        return None
    read, written = list[Tensor](), list[Tensor]()

    def replace(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        read.append(inputs[0])
        numbers = torch.arange(output.numel(), device=output.device).reshape(output.shape)
        written.append(numbers.to(output.dtype))
        return written[-1]

    handle = linear.register_forward_hook(replace)
    try:
        logits, states = _of_short_rows(lm, tokens).logits, _of_short_rows(lm.base_model, tokens).last_hidden_state
    except RuntimeError:
        return None
    finally:
        handle.remove()
    if len(read) != 1 or read[0].shape != states.shape or not torch.allclose(read[0], states, rtol=1e-2, atol=1e-3):
        return f"its layer {type(linear).__name__} does not read the last states of {type(lm.base_model).__name__}"
    expected, rounding = written[0].to(logits.dtype), 0.0
    if isinstance(head, ScaledHead):
        expected, rounding = head.change(written[0]).to(logits.dtype), 1e-2 if logits.dtype.itemsize < 4 else 1e-5
    if not torch.allclose(logits, expected, rtol=rounding):
        return "it changes the logits of its last layer"
    _plain_heads.add(lm)
    return None


def applies_dropout(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules, without those inside it, would apply dropout now."""
    training = [module for module in modules if module.training]
    # Attention keeps its rate as a number, as in self.attention_dropout; so do routers that jitter.
    rates = [rate for module in training for name, rate in vars(module).items() if "drop" in name or "jitter" in name]
    rates += [module.p for module in training if isinstance(module, nn.modules.dropout._DropoutNd)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


FINAL_NORMS = ("ln_f", "norm", "final_layer_norm", "final_layernorm", "final_norm", "decoder.final_layer_norm")
"""Names of the norm after the last block in Hugging Face models."""


FULL, SLIDING = "full_attention", "sliding_attention"
# These attention implementations take a float mask as it is; others build their own masks or need kernels per shape.
_MASKED = ("sdpa", "eager")


def attention_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The number of tokens, including itself, that a token attends to, by kind of layer; None for all tokens.

    Examples:
        >>> from transformers import AutoConfig
        >>> from torchrl_lang.modules.hugging_face import attention_windows
        >>> attention_windows(AutoConfig.for_model("mistral", sliding_window=128))
        {'sliding_attention': 128}
        >>> attention_windows(AutoConfig.for_model("gpt2"))
        {'full_attention': None}
    """
    window, limit = getattr(config, "sliding_window", None), positions(config)
    kinds = getattr(config, "layer_types", None) or [FULL if window is None else SLIDING]
    if window is not None and limit is not None and window >= limit:
        window = None
    return {kind: window if kind == SLIDING else None for kind in sorted(set(kinds))}


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether a model embeds a position differently in longer rows, as some kinds of scaled rotary positions do."""
    kinds = str([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")])
    return "longrope" in kinds or "dynamic" in kinds


def cache_obstacle(model: PreTrainedModel) -> str | None:
    """Why a model without its head cannot read rows incrementally with our masks, in words; None if it can."""
    config: Any = model.config
    others, attention = sorted(set(attention_windows(config)) - {FULL, SLIDING}), config._attn_implementation
    obstacles = {
        f"its layers are of the kinds {others}": others,
        "its local attention builds masks of its own": "local" in getattr(config, "attention_layers", ()),
        "its layers share keys and values": getattr(config, "num_kv_shared_layers", 0),
        f"{attention!r} takes no mask over keys: use attn_implementation='sdpa'": attention not in _MASKED,
        "its alibi is that of a mask of whole rows": getattr(config, "alibi", False),
        "it takes no position_ids": not _takes_positions(type(model).forward),
    }
    return next((obstacle for obstacle, found in obstacles.items() if found), None)


@cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    return "position_ids" in signature(forward).parameters


def is_adapter(module: Any) -> bool:
    """Whether PEFT replaced a module by this one, which contains it and further weights.

    Does not need peft to be installed.
    """
    return hasattr(type(module), "adapter_layer_names") and hasattr(type(module), "disable_adapters")


def base_module(module: Any) -> Any:
    """The module that PEFT replaced; other modules are returned unchanged."""
    while is_adapter(module):
        module = module.get_base_layer() if hasattr(module, "base_layer") else module.original_module
    return module


def merged_copy(lm: PreTrainedModel) -> PreTrainedModel:
    """A model without adapters that computes the same as ``lm`` with its active ones; ``lm`` itself if it has none.

    With adapters the whole model is copied, because merging and unmerging would round its weights. Tied weights are
    untied if an adapter changed one of them.

    Examples:
        >>> from peft import LoraConfig, get_peft_model
        >>> from torchrl_lang.modules import causal_lm
        >>> from torchrl_lang.modules.hugging_face import merged_copy
        >>> lm = causal_lm("llama", vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> tuned = get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
        >>> [name for name in merged_copy(tuned).state_dict() if "q_proj" in name]
        ['model.layers.0.self_attn.q_proj.weight']
    """
    if not any(is_adapter(module) for module in lm.modules()):
        return lm
    lm, merged = deepcopy(lm), list[str]()
    for name, module in list(lm.named_modules(remove_duplicate=False)):
        if is_adapter(module) and not name.startswith(tuple(merged)):  # adapters within go with the outer one
            merged.append(f"{name}.")
            parent, _, last = name.rpartition(".")
            setattr(lm.get_submodule(parent), last, _merged(module))
    lm._hf_peft_config_loaded = False
    if hasattr(lm, "peft_config"):
        del lm.peft_config
    embeddings = lm.get_input_embeddings(), lm.get_output_embeddings()
    if embeddings[0].weight is not getattr(embeddings[1], "weight", None):
        lm.config.tie_word_embeddings = False
    return lm


def _merged(layer: Any) -> nn.Module:
    """The module that an adapter replaced, with the adapter merged into it if it is active."""
    if not layer.disable_adapters:
        base = base_module(layer)
        if type(getattr(base, "weight", None)) is nn.Parameter:  # not quantized; copied, so that a tied one is kept
            base.weight = nn.Parameter(base.weight.detach().clone(), base.weight.requires_grad)
    if hasattr(layer, "unload_and_optionally_merge_module"):  # a module that is trained as a whole
        if layer.disable_adapters:
            return layer.original_module
        return layer.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
    if not layer.disable_adapters:
        layer.merge()
    elif layer.merged:
        layer.unmerge()
    return layer.get_base_layer()


@contextmanager
def without_adapters(actor: nn.Module) -> Iterator[None]:
    """No adapters, evaluation mode, no gradients; on exit every module is as it was."""
    layers = adapter_layers(actor)
    refuse_merged(layers)
    layers = [layer for layer in layers if not layer.disable_adapters]
    # Switching off and on again also sets which adapters train.
    trains = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        with eval_mode(actor), torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in trains:
            parameter.requires_grad_(flag)


def adapter_layers(actor: nn.Module) -> list[Any]:
    """PEFT's layers in the actor."""
    return [module for module in actor.modules() if is_adapter(module)]


def adapter_weights(actor: nn.Module) -> Iterator[Tensor]:
    """The weights of the adapters."""
    for layer in adapter_layers(actor):
        for held in (getattr(layer, name, None) for name in layer.adapter_layer_names):
            if isinstance(held, nn.Module):
                yield from (*held.parameters(), *held.buffers())
            elif isinstance(held, Tensor):
                yield held


def refuse_merged(layers: list[Any]) -> None:
    """Raise where adapters are merged into the base weights, and so cannot be switched off."""
    if any(layer.merged_adapters for layer in layers):
        raise ValueError("The adapters are merged: call unmerge_adapter() first, or frozen_copy(actor, share=False).")
