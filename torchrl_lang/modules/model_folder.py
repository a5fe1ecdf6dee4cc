"""Check a model folder before transformers reads it: no code, no pickles, complete files, matching sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_lang._files import (
    Fields,
    FileError,
    TensorHeader,
    check_model_config,
    file_in,
    nested_fields,
    read_json,
    read_tensor_headers,
)
from torchrl_lang._files.errors import one_line, shorten

__all__ = ["REMEDY", "TRUST", "check_model_folder"]

REMEDY = "save or download the model again"
TRUST = "if you trust its author, load it with trust_remote_code=True"

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Fields of a configuration that are counts of modules or list entries.
_COUNTS = re.compile(r"(layers|n_layer|experts|blocks|labels)$")
_MANY = 1024
_LARGE_BUFFERS = 1 << 28

_Files = Mapping[Path, Mapping[str, TensorHeader]]
"""The tensor headers of the weight files."""


def check_model_folder(folder: Path) -> None:
    """Reject a Hugging Face folder that transformers must not or cannot read.

    Runs no code and reads no weights: the model is built on the meta device to compare its size with the files'.

    Raises:
        FileError: a file is missing or damaged; the folder contains code, pickles or adapters instead of a plain model;
            or its configuration does not match its weights.
    """
    config = Fields.read(folder / _CONFIG, remedy=REMEDY)
    _refuse_other_kinds(folder)
    _check_type(config)
    check_model_config(config)
    if (folder / "generation_config.json").exists():
        read_json(folder / "generation_config.json", remedy=REMEDY)
    files = {path: read_tensor_headers(path, remedy=REMEDY) for path in _weight_files(folder)}
    lm = _described(config, sum(len(headers) for headers in files.values()))
    _check_sizes(config, lm, files)
    if "quantization_config" not in config.content:  # quantized weights are packed into integers
        _check_dtypes(lm, files)


def _refuse_other_kinds(folder: Path) -> None:
    """Reject folders of which transformers would read or run more than a configuration and safetensors files."""
    if (folder / "custom_generate").exists():
        raise FileError(
            folder, "holds code for generation (custom_generate), which is not run", f"delete it, or {TRUST}"
        )
    if (folder / "adapter_config.json").exists():
        remedy = "load it with PEFT, call merge_and_unload() and save the result"
        raise FileError(folder, "holds PEFT adapters (adapter_config.json), not a complete model", remedy)
    if any(folder.glob("shard-*-model-*.safetensors")):
        raise FileError(folder, "holds a distributed checkpoint", "consolidate it into model.safetensors")


def _check_type(config: Fields) -> None:
    kind = config.take("model_type", str)
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if "auto_map" in config.content:
            raise FileError(
                config.path.parent, f"needs code of its own for the model type {shorten(kind)}, which is not run", TRUST
            )
        raise config.error(f"names the model type {shorten(kind)}, not a causal language model of transformers")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).exists():
        if any(folder.glob("*.bin")):
            remedy = "convert them to safetensors if you trust them"
            raise FileError(folder, "holds pickled weights (.bin), which are never read", remedy)
        raise FileError(folder / _WEIGHTS, "is missing", REMEDY)
    weights = Fields.read(folder / _INDEX, remedy=REMEDY).object("weight_map")
    names = sorted({weights.take(name, str) for name in weights.content})
    wrong = [name for name in names if not name.endswith(".safetensors")]
    if wrong or not names:
        raise weights.error(f"names the files {shorten(wrong)}, expected safetensors files")
    return [file_in(folder, name, remedy=REMEDY, links=True) for name in names]


def _described(config: Fields, tensors: int) -> PreTrainedModel:
    """The model that a configuration describes, on the meta device, for weights with ``tensors`` tensors."""
    for name, value in nested_fields(config.content):
        if _COUNTS.search(name) and isinstance(value, int) and value > max(tensors, _MANY):
            raise config.error(f'has {shorten(value)} as "{name}", but the weights have {tensors} tensors')
    try:
        described = AutoConfig.from_pretrained(config.path.parent, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    except Exception as error:  # model code raises any kind of exception for unexpected values
        raise config.error(f"describes no model ({one_line(error)})") from error


def _check_sizes(config: Fields, lm: PreTrainedModel, files: _Files) -> None:
    """Reject a configuration of a model far larger than the weights, which could exhaust the memory."""
    held = sum(prod(header.shape) for headers in files.values() for header in headers.values())
    needed = sum(parameter.numel() for parameter in lm.parameters())
    buffers = sum(buffer.numel() for buffer in lm.buffers())
    # Quantized weights are packed, for instance sixteen numbers of two bits in an int32.
    if needed > 16 * held or buffers > max(8 * held, _LARGE_BUFFERS):
        raise config.error(f"describes a model of {needed + buffers} numbers, but its weights have {held}")


def _check_dtypes(lm: PreTrainedModel, files: _Files) -> None:
    """Reject weights that are not floating-point numbers, which transformers would cast without a warning."""
    prefix = f"{lm.base_model_prefix}."  # missing in files of the headless model
    parameters = {name.removeprefix(prefix) for name, _ in lm.named_parameters()}
    for path, headers in files.items():
        for name, header in headers.items():
            if name.removeprefix(prefix) in parameters and not header.dtype.startswith(("F", "BF")):
                raise FileError(path, f"holds {name} as {header.dtype}, expected floating-point numbers", REMEDY)
