"""Causal language models: built from scratch from a few numbers, or loaded by name and fitted to a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_lang.modules.causality import check_causal

__all__ = ["causal_lm", "fit_vocabulary", "load_causal_lm"]


class _Sized(Protocol):
    """What is needed of a tokenizer here: how many ids it has."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""


def causal_lm(
    kind: Literal["gpt2", "llama", "qwen2"] | str = "gpt2",
    *,
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    max_length: int,
    pad: int | None = None,
    **config: Any,
) -> PreTrainedModel:
    """A causal language model with fresh weights, drawn from torch's global random stream as Hugging Face does.

    Models are built without dropout; GPT-2 with the tanh approximation of GELU in its fused form and tied embeddings.

    Args:
        kind: a Hugging Face model type.
        vocab_size: number of token ids, e.g. ``tokenizer.vocab_size``.
        layers: number of transformer blocks.
        width: ``H``, a multiple of ``heads``.
        heads: attention heads.
        max_length: positions, at least the width of the rows.
        pad: id of the padding token, ``tokenizer.control.pad``.
        **config: further fields of the model's Hugging Face configuration.

    Raises:
        ValueError: ``width`` is no multiple of ``heads``, ``kind`` is unknown to transformers, or its models are not
            causal.

    Examples:
        >>> from torchrl_lang.modules import causal_lm
        >>> lm = causal_lm("llama", vocab_size=35, layers=1, width=16, heads=2, max_length=64, pad=29)
        >>> lm.config.model_type, lm.get_input_embeddings().weight.shape
        ('llama', torch.Size([35, 16]))
    """
    if width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}.")
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "max_position_embeddings": max_length,
        "pad_token_id": pad,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind == "gpt2":
        fields |= {"activation_function": "gelu_pytorch_tanh", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    else:
        fields |= {"num_key_value_heads": heads, "intermediate_size": 4 * width, "attention_dropout": 0.0}
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(fields | config)))
    check_causal(lm)
    return lm


def load_causal_lm(name_or_path: str | Path, tokenizer: _Sized | None = None, **kwargs: Any) -> PreTrainedModel:
    """Load a pretrained causal language model, by name or from a folder, with embeddings for every id of a tokenizer.

    Args:
        name_or_path: a name on the Hugging Face hub, or a folder written by ``save_pretrained``.
        tokenizer: its ``vocab_size`` is what the embeddings are fitted to, see :func:`fit_vocabulary`.
        **kwargs: passed to ``AutoModelForCausalLM.from_pretrained``. Weights load from safetensors only.

    Raises:
        OSError: nothing is found under that name.
    """
    kwargs.setdefault("use_safetensors", True)
    lm = AutoModelForCausalLM.from_pretrained(str(name_or_path), **kwargs)
    return lm if tokenizer is None else fit_vocabulary(lm, tokenizer.vocab_size)


def fit_vocabulary(lm: PreTrainedModel, vocab_size: int, *, shrink: bool = False) -> PreTrainedModel:
    """Give ``lm`` embeddings for ``vocab_size`` ids, in place; new ones are drawn as Hugging Face draws them.

    Embeddings are not cut off unless asked to: a model often has a few more than its tokenizer, padded to a round
    number. An :class:`~torchrl_lang.modules.UtteranceActor` does not generate the ids beyond the tokenizer's.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, fit_vocabulary
        >>> lm = causal_lm(vocab_size=10, layers=1, width=8, heads=2, max_length=8)
        >>> fit_vocabulary(lm, 13).get_output_embeddings().weight.shape
        torch.Size([13, 8])
    """
    have = lm.get_input_embeddings().weight.shape[0]
    if vocab_size > have or (shrink and vocab_size < have):
        lm.resize_token_embeddings(vocab_size)
    return lm
