"""Causal language models: built from scratch, or loaded by name with embeddings for a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field

from torchrl_lang import _files
from torchrl_lang._checks import check_heads, check_options
from torchrl_lang._files import FileError, Record, file_errors, file_in, nested_fields, one_line, read_json, shorten
from torchrl_lang.modules.fast_linear import FastLinear
from torchrl_lang.modules.hugging_face import check_causal
from torchrl_lang.text.gguf_files import without_gguf

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

# Files to download: configuration and weights, but no code and no pickles.
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_DOWNLOADED = (_CONFIG, "generation_config.json", _WEIGHTS, _INDEX, "model-*.safetensors")
_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


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
    """A causal language model with random weights, drawn from torch's global generator as Hugging Face does.

    Models have no dropout; GPT-2 has tied embeddings and the fused tanh approximation of GELU. Large products
    of linear layers are by oneDNN in float32 on a CPU, which is twice as fast on some.

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
        ValueError: ``width`` is not a multiple of ``heads``, ``kind`` is unknown to transformers, or its models are
            not causal.

    Examples:
        >>> from torchrl_lang.modules import causal_lm
        >>> lm = causal_lm("llama", vocab_size=35, layers=1, width=16, heads=2, max_length=64, pad=29)
        >>> lm.config.model_type, lm.get_input_embeddings().weight.shape
        ('llama', torch.Size([35, 16]))
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # here and below, because it takes a second

    from torchrl_lang.modules.fast_layers import use_fast_layers

    check_heads(width, heads)
    fields: dict[str, Any] = {"vocab_size": vocab_size, "num_hidden_layers": layers, "hidden_size": width}
    fields |= {"num_attention_heads": heads, "max_position_embeddings": max_length}
    fields |= {"pad_token_id": pad, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        fields |= {"activation_function": "gelu_pytorch_tanh"}
    else:
        fields |= {"num_key_value_heads": heads, "intermediate_size": 4 * width}
    described = AutoConfig.for_model(kind, **(fields | config))
    rates = {name for name, value in described.to_dict().items() if "drop" in name and isinstance(value, float)}
    for name in rates - config.keys():
        setattr(described, name, 0.0)
    lm = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    check_causal(lm)
    use_fast_layers(lm)
    return lm


def load_causal_lm(
    name_or_path: str | Path,
    tokenizer: Any = None,
    *,
    trust_remote_code: bool = False,
    quantize: Literal["4bit", "8bit"] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a pretrained causal language model, by name or from a folder, with embeddings for every id of a tokenizer.

    Weights are read from safetensors files only, and all weights of the model must be there. Code in the model's folder
    runs only with ``trust_remote_code=True``, which also disables the checks of the folder before it is read. Large
    products of linear layers are by oneDNN in float32 on a CPU, which is twice as fast on some.

    Args:
        name_or_path: a name on the Hugging Face hub, a folder written by ``save_pretrained``, or a GGUF file of
            llama.cpp, which the first call converts to such a folder beside it; this needs the extra ``gguf``.
        tokenizer: any object with a ``vocab_size``, to which the embeddings are extended, see :func:`fit_vocabulary`.
        trust_remote_code: run code that comes with the model, with all rights of this process. Read that code first.
        quantize: store the weights of linear layers in 4 bits (NF4, double quantization; QLoRA, arXiv 2305.14314) or 8
            bits, to train adapters over them. Needs the extra ``bitsandbytes`` and CUDA.
        **kwargs: passed to ``AutoModelForCausalLM.from_pretrained``, such as ``dtype`` and ``revision``.

    Raises:
        ImportError, ValueError: ``quantize`` is given, but bitsandbytes or CUDA is missing.
        OSError: there is no model of this name, or no such GGUF file.
        FileError: the model is damaged, its configuration does not match its weights, some weights are not finite, or
            it needs its own code.

    Examples:
        >>> import json, pathlib, tempfile
        >>> from torchrl_lang.modules import causal_lm, load_causal_lm
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     causal_lm(vocab_size=11, layers=2, width=8, heads=2, max_length=16).save_pretrained(folder)
        ...     path = pathlib.Path(folder) / "config.json"
        ...     _ = path.write_text(path.read_text().replace('"n_layer": 2', '"n_layer": 3'))
        ...     load_causal_lm(folder)
        Traceback (most recent call last):
            ...
        torchrl_lang._files.readers.FileError: ... lacks the weights transformer.h.2.attn.c_attn.bias, ... and 9 more,
        which its configuration describes: save or download the model again.
    """
    from transformers import AutoModelForCausalLM

    from torchrl_lang.modules.agilerl.model import register_agilerl
    from torchrl_lang.modules.fast_layers import use_fast_layers

    register_agilerl()
    source = without_gguf(name_or_path)
    if quantize is not None:
        kwargs = {"device_map": {"": 0}, **kwargs, "quantization_config": _quantization(quantize)}
    if trust_remote_code and not Path(source).is_dir():
        folder: str | Path = source  # its code is downloaded with it
    else:
        folder = _folder(source, kwargs)
    # Damaged files raise any kind of exception, with messages of many lines.
    with file_errors(folder, "cannot be loaded", REMEDY, Exception), quiet_transformers():
        if not trust_remote_code:
            check_model_folder(Path(folder))
        lm, info = AutoModelForCausalLM.from_pretrained(
            str(folder),
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are among the loading info
            **kwargs,
        )
    named = lm.config.architectures or [type(lm).__name__]
    kind = f"its configuration names {named[0]}, give a causal language model"
    _files.check_loaded_weights(folder, lm, info, remedy=REMEDY if type(lm).__name__ in named else kind)
    check_causal(lm)
    lm.name_or_path = lm.config.name_or_path = str(name_or_path)
    if tokenizer is not None:
        fit_vocabulary(lm, tokenizer.vocab_size)
    use_fast_layers(lm)
    return lm


def _quantization(kind: str) -> BitsAndBytesConfig:
    from transformers.utils.quantization_config import BitsAndBytesConfig

    check_options(quantize=(kind, ("4bit", "8bit")))
    if find_spec("bitsandbytes") is None:
        raise ImportError("quantize= needs bitsandbytes: pip install 'torchrl-lang[bitsandbytes]'.")
    if not torch.cuda.is_available():
        raise ValueError(f"quantize={kind!r} needs CUDA, which torch does not find here: load the model without it.")
    if kind == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    return BitsAndBytesConfig(load_in_4bit=True, **nf4)


def _folder(name_or_path: str | Path, kwargs: dict[str, Any]) -> Path:
    """The folder of a model, downloaded if it is a name; removes the options of the download from ``kwargs``."""
    options = {name: kwargs.pop(name) for name in _DOWNLOAD_OPTIONS if name in kwargs}
    subfolder = kwargs.pop("subfolder", "")
    folder = Path(name_or_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        prefix = f"{subfolder}/" if subfolder else ""
        patterns = [prefix + name for name in _DOWNLOADED]
        try:
            folder = Path(snapshot_download(str(name_or_path), allow_patterns=patterns, **options))
        except (OSError, ValueError) as error:
            found = f"There is no folder or model of the Hugging Face hub {str(name_or_path)!r} ({one_line(error)})"
            raise OSError(f"{found}: check the name and the connection.") from error
    return folder / subfolder


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable progress bars and reports: models are saved often, and errors contain all problems."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    try:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def fit_vocabulary(lm: PreTrainedModel, vocab_size: int, *, shrink: bool = False) -> PreTrainedModel:
    """Resize the embeddings of ``lm`` to at least ``vocab_size`` ids, in place; Hugging Face initializes new ones.

    Embeddings are removed only with ``shrink``, because models often have a few more than their tokenizers, padded to a
    round number. An :class:`~torchrl_lang.modules.UtteranceActor` does not generate ids beyond the tokenizer's.

    Examples:
        >>> from torchrl_lang.modules import causal_lm
        >>> from torchrl_lang.modules.language_model import fit_vocabulary
        >>> lm = causal_lm(vocab_size=10, layers=1, width=8, heads=2, max_length=8)
        >>> fit_vocabulary(lm, 13).get_output_embeddings().weight.shape
        torch.Size([13, 8])
    """
    have, head = lm.get_input_embeddings().weight.shape[0], lm.get_output_embeddings()
    if vocab_size > have or (shrink and vocab_size < have):
        lm.resize_token_embeddings(vocab_size)
        if isinstance(head, FastLinear):  # the new one is not
            from torchrl_lang.modules.fast_layers import use_fast_layers  # imports transformers

            use_fast_layers(lm.get_output_embeddings())
    return lm


REMEDY = "save or download the model again"
TRUST = "if you trust its author, load it with trust_remote_code=True"

# Fields of a configuration that are counts of modules or list entries.
_COUNTS = re.compile(r"(layers|n_layer|experts|blocks|labels)$")
_MANY = 1024
_LARGE = 1 << 28


class _Index(Record):
    model_config = ConfigDict(extra="ignore")

    weight_map: Annotated[dict[str, Annotated[str, Field(pattern=r"\.safetensors$")]], Field(min_length=1)]


def check_model_folder(folder: Path) -> None:
    """Reject a Hugging Face folder that transformers must not or cannot read.

    Runs no code and reads no weights: the model is built on the meta device to compare its size with the files'.

    Raises:
        FileError: a file is missing or damaged; the folder contains code, pickles or adapters instead of a plain model;
            or its configuration does not match its weights.
    """
    path = folder / _CONFIG
    config = read_json(path, remedy=REMEDY)
    for pattern, found, remedy in (
        ("custom_generate", "code for generation (custom_generate), which is not run", f"delete it, or {TRUST}"),
        ("adapter_config.json", "PEFT adapters, not a complete model", "load it with PEFT, merge and save the result"),
        ("shard-*-model-*.safetensors", "a distributed checkpoint", "consolidate it into model.safetensors"),
    ):
        if any(folder.glob(pattern)):
            raise FileError(folder, f"holds {found}", remedy)
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if "auto_map" in config:
            raise FileError(folder, f"needs code of its own for the model type {kind!r}, which is not run", TRUST)
        raise FileError(path, f"has the model type {shorten(kind)}", "give a causal language model")
    _files.check_model_config(config, path, remedy=REMEDY)
    weights: dict[str, Any] = {}
    for file in _weight_files(folder):
        weights |= _files.read_tensor_headers(file, remedy=REMEDY)
    lm = _described(path, config, len(weights))
    # A model far larger than the weights could exhaust the memory. Quantized weights are packed, for instance sixteen
    # numbers of two bits in an int32.
    held = sum(prod(header.shape) for header in weights.values())
    needed = sum(tensor.numel() for tensor in (*lm.parameters(), *lm.buffers()))
    if needed > max(16 * held, _LARGE):
        raise FileError(path, f"describes a model of {needed} numbers, but its weights have {held}", REMEDY)
    # Transformers would cast weights that are not floating-point numbers without a warning.
    prefix = f"{lm.base_model_prefix}."  # missing in files of the headless model
    own = {name.removeprefix(prefix) for name, _ in lm.named_parameters()}
    cast = [name for name, header in weights.items() if not header.dtype.startswith(("F", "BF"))]
    cast = [name for name in cast if name.removeprefix(prefix) in own]
    if cast and "quantization_config" not in config:
        raise FileError(folder, f"holds {cast[0]} as {weights[cast[0]].dtype}, expected floating-point numbers", REMEDY)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).exists():
        safe = "save the model with save_pretrained, which writes safetensors"
        raise FileError(folder / _WEIGHTS, "is missing, and pickled weights (.bin) are never read", safe)
    index = _Index.parse(read_json(folder / _INDEX, remedy=REMEDY), folder / _INDEX, remedy=REMEDY)
    names = sorted(set(index.weight_map.values()))
    return [file_in(folder, name, remedy=REMEDY, links=True) for name in names]


def _described(path: Path, config: Mapping[str, Any], tensors: int) -> PreTrainedModel:
    """The model that a configuration describes, on the meta device, for weights with ``tensors`` tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, value in nested_fields(config):
        if _COUNTS.search(name) and isinstance(value, int) and value > max(tensors, _MANY):
            raise FileError(path, f'has {shorten(value)} as "{name}", but the weights have {tensors} tensors', REMEDY)
    with file_errors(path, "describes no model", REMEDY, Exception), torch.device("meta"):  # model code raises any kind
        described = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(described, trust_remote_code=False)
