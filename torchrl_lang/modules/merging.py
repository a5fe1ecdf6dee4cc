"""Merge PEFT adapters into the weights of a model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

__all__ = ["base_module", "is_adapter", "merged_copy"]


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
        >>> from torchrl_lang.modules.merging import merged_copy
        >>> lm = causal_lm("llama", vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> tuned = get_peft_model(lm, LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
        >>> [name for name in merged_copy(tuned).state_dict() if "q_proj" in name]
        ['model.layers.0.self_attn.q_proj.weight']
    """
    if not any(is_adapter(module) for module in lm.modules()):
        return lm
    lm = deepcopy(lm)
    for name, module in list(lm.named_modules(remove_duplicate=False)):
        if is_adapter(module) and _is_outermost(lm, name):
            parent, _, last = name.rpartition(".")
            setattr(lm.get_submodule(parent), last, _merged(module))
    lm._hf_peft_config_loaded = False
    if hasattr(lm, "peft_config"):
        del lm.peft_config
    embeddings = lm.get_input_embeddings(), lm.get_output_embeddings()
    if embeddings[0].weight is not getattr(embeddings[1], "weight", None):
        lm.config.tie_word_embeddings = False
    return lm


def _is_outermost(lm: nn.Module, name: str) -> bool:
    """Whether the module is still part of the model and not inside another PEFT module."""
    module: nn.Module = lm
    for part in name.split("."):
        if is_adapter(module) or not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


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
