"""The model that a training run begins with, if it is not from scratch, and which of its weights train."""

from __future__ import annotations

import warnings
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from torchrl_lang._checks import needs_extra
from torchrl_lang.modules import train_top_layers
from torchrl_lang.modules.fast_layers import use_fast_layers
from torchrl_lang.modules.frozen.lower_layers import transformer_blocks
from torchrl_lang.modules.language_model import fit_vocabulary, load_causal_lm, quiet_transformers
from torchrl_lang.modules.save import SavedModel
from torchrl_lang.recipes.algorithms.training import RunOptions
from torchrl_lang.recipes.load_run import load_model, refuse_returns
from torchrl_lang.text import ChatTokenizer, HFTokenizer, Tokenizer
from torchrl_lang.text.hf_tokenizer import load_hf_tokenizer


def load_start(folder: Path, tokenizer: Tokenizer, options: RunOptions) -> SavedModel:
    """The model of a finished run, a saved agent or a Hugging Face folder, for rows of a tokenizer.

    Raises:
        FileNotFoundError: there is none, or the run has not finished.
        ValueError: it has other tokens, or is a decision transformer.
    """
    model, own = load_model(folder, dtype=options.loaded_dtype())
    refuse_returns(folder, model)
    if own is None:
        return model._replace(lm=_fitted(model.lm, folder, tokenizer, options))
    if own.config() != tokenizer.config():
        raise ValueError(f"The model in {folder} has other tokens than the data or games: start from one with theirs.")
    return model


def load_pretrained(name: str, tokenizer: Tokenizer, options: RunOptions) -> PreTrainedModel:
    """A pretrained model with the embeddings of a tokenizer.

    Raises:
        OSError: there is no such model.
        ValueError: it has other tokens, and the tokenizer is a Hugging Face model's as well.
    """
    return _fitted(load_causal_lm(name, dtype=options.loaded_dtype()), name, tokenizer, options)


def choose_weights(lm: PreTrainedModel, options: RunOptions) -> None:
    """Add the LoRA adapters (arXiv 2106.09685) that the options ask for, or freeze the lower blocks, in place.

    Raises:
        ImportError: peft is missing.
        ValueError: the model has fewer blocks.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.modules import causal_lm
        >>> from torchrl_lang.recipes.algorithms import BC
        >>> from torchrl_lang.recipes.initial_model import choose_weights
        >>> lm = causal_lm("llama", vocab_size=11, layers=2, width=8, heads=2, max_length=16)
        >>> options = BC(data=Path("d"), out=Path("o"), pretrained="any", lora_rank=2, lora_layers=1)
        >>> choose_weights(lm, options)
        >>> {name[:14] for name, weight in lm.named_parameters() if weight.requires_grad}
        {'model.layers.1'}
    """
    if options.top_layers is not None:
        train_top_layers(lm, options.top_layers, dtype=options.torch_dtype())
    if options.lora_rank is None:
        return
    with needs_extra("--lora-rank", "peft"):
        from peft import LoraConfig, get_peft_model
    blocks = transformer_blocks(lm)
    number = len(blocks) if options.lora_layers is None else options.lora_layers
    if number > len(blocks):
        raise ValueError(f"--lora-layers {number} is more than the model's {len(blocks)} blocks: lower it.")
    layers = {layer for layer in blocks[len(blocks) - number :].modules() if isinstance(layer, nn.Linear | Conv1D)}
    names = [name for name, layer in lm.named_modules() if layer in layers]
    transposed = any(isinstance(layer, Conv1D) for layer in layers)
    rank = options.lora_rank
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
        get_peft_model(lm, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, fan_in_fan_out=transposed))
    use_fast_layers(lm)


def _fitted(lm: PreTrainedModel, source: str | Path, tokenizer: Tokenizer, options: RunOptions) -> PreTrainedModel:
    """The model with embeddings for the ids of a tokenizer, which must mean the same to both."""
    if isinstance(tokenizer, HFTokenizer | ChatTokenizer):
        _check_ids(source, tokenizer)
    new = tokenizer.vocab_size - lm.get_input_embeddings().weight.shape[0]
    if new > 0 and (options.lora_rank or options.top_layers):
        remedy = "train all weights, or use a ChatTokenizer, which needs no new tokens"
        warnings.warn(f"{new} tokens are new to {source}, and their embeddings stay random: {remedy}.", stacklevel=2)
    if new < 0:
        print(f"{source}: {-new} embeddings that no token of its tokenizer has are left out", flush=True)
    with quiet_transformers():
        return fit_vocabulary(lm, tokenizer.vocab_size, shrink=True)


def _check_ids(source: str | Path, tokenizer: HFTokenizer | ChatTokenizer) -> None:
    """Raise ValueError unless the tokenizer that comes with a model, if one does, has the same ids."""
    if Path(source).is_dir() and not any(Path(source).glob("tokenizer*")):
        return  # transformers would make one up
    theirs = load_hf_tokenizer(source, trust_remote_code=False).get_vocab()
    own = tokenizer.backend.get_vocab(with_added_tokens=True)
    for token, index in theirs.items():
        if own.get(token) != index:
            found = f"{token!r} has the id {index} there and {own.get(token, 'none')} in the data or games"
            raise ValueError(f"{source} has other tokens, {found}: make these with its tokenizer, or give their model.")
