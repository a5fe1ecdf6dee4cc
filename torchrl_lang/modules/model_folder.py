"""What a model folder must be before transformers reads it: no code, no pickles, whole files, sizes that fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_lang.storage import Fields, FileError, TensorHeader, file_in, read_json, read_tensor_headers
from torchrl_lang.storage.errors import one_line, shorten

__all__ = ["REMEDY", "TRUST", "check_model_folder"]

REMEDY = "save or download the model again"
TRUST = "if you trust whoever wrote it, load it with trust_remote_code=True"

_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Fields of a configuration that a model is built, or a list is filled, as many times as.
_COUNTS = re.compile(r"(layers|n_layer|experts|blocks|labels)$")
_MANY = 1024
_LARGE_BUFFERS = 1 << 28

_Files = Mapping[Path, Mapping[str, TensorHeader]]
"""What the weight files say of their tensors."""


def check_model_folder(folder: Path) -> None:
    """Refuse a Hugging Face folder that transformers must not read, or could not.

    Nothing is run, and no weight is read: the model is built without memory to compare its size with the files'.

    Raises:
        FileError: a file is missing or damaged; the folder holds code, pickles or adapters in place of a plain model;
            or its configuration describes another model than its weights are of.
    """
    config = Fields.read(folder / _CONFIG, remedy=REMEDY)
    _refuse_other_kinds(folder)
    _check_type(config)
    _check_values(config)
    if (folder / "generation_config.json").exists():
        read_json(folder / "generation_config.json", remedy=REMEDY)
    files = {path: read_tensor_headers(path, remedy=REMEDY) for path in _weight_files(folder)}
    lm = _described(config, sum(len(headers) for headers in files.values()))
    _check_sizes(config, lm, files)
    if "quantization_config" not in config.content:  # quantized weights are packed into integers
        _check_dtypes(lm, files)


def _refuse_other_kinds(folder: Path) -> None:
    """Refuse folders of which transformers would read, or run, more than a configuration and safetensors files."""
    if (folder / "custom_generate").exists():
        raise FileError(
            folder, "holds code for generation (custom_generate), which is not run", f"delete it, or {TRUST}"
        )
    if (folder / "adapter_config.json").exists():
        remedy = "load it with PEFT, call merge_and_unload() and save the result"
        raise FileError(folder, "holds PEFT adapters (adapter_config.json), not a whole model", remedy)
    if any(folder.glob("shard-*-model-*.safetensors")):
        raise FileError(folder, "holds a distributed checkpoint", "consolidate it into model.safetensors")


def _check_type(config: Fields) -> None:
    kind = config.take("model_type", str)
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if "auto_map" in config.content:
            raise FileError(
                config.path.parent, f"needs code of its own for the model type {shorten(kind)}, which is not run", TRUST
            )
        raise config.error(f"names the model type {shorten(kind)}, which is no causal language model of transformers")


def _check_values(config: Fields) -> None:
    """Refuse fields by which a configuration reaches beyond its folder, and dtypes that weights cannot have."""
    if "transformers_weights" in config.content:
        raise config.error(f"names another file of weights, {shorten(config.content['transformers_weights'])}")
    for name, value in _fields(config.content):
        if name.endswith("_implementation") and "/" in str(value):
            raise FileError(
                config.path, f"asks for code from elsewhere: {name} is {shorten(value)}", "delete the field"
            )
        if name in ("dtype", "torch_dtype") and value not in (None, "auto"):
            dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise config.error(f'has {shorten(value)} as "{name}", expected a dtype such as "float32"')


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).exists():
        if any(folder.glob("*.bin")):
            remedy = "convert them to safetensors where you trust them"
            raise FileError(folder, "holds pickled weights (.bin), which are never read", remedy)
        raise FileError(folder / _WEIGHTS, "is missing", REMEDY)
    weights = Fields.read(folder / _INDEX, remedy=REMEDY).object("weight_map")
    names = sorted({weights.take(name, str) for name in weights.content})
    wrong = [name for name in names if not name.endswith(".safetensors")]
    if wrong or not names:
        raise weights.error(f"names the files {shorten(wrong)}, expected safetensors files")
    return [file_in(folder, name, remedy=REMEDY, links=True) for name in names]


def _described(config: Fields, tensors: int) -> PreTrainedModel:
    """The model that a configuration describes, without memory, beside weights of so many tensors."""
    for name, value in _fields(config.content):
        if _COUNTS.search(name) and isinstance(value, int) and value > max(tensors, _MANY):
            raise config.error(f'has {shorten(value)} as "{name}", beside weights of {tensors} tensors')
    try:
        described = AutoConfig.from_pretrained(config.path.parent, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    except Exception as error:  # whatever a model's own code makes of values that it did not expect
        raise config.error(f"describes no model ({one_line(error)})") from error


def _check_sizes(config: Fields, lm: PreTrainedModel, files: _Files) -> None:
    """Refuse a configuration of a model that is far larger than the weights: to build it could exhaust the memory."""
    held = sum(prod(header.shape) for headers in files.values() for header in headers.values())
    needed = sum(parameter.numel() for parameter in lm.parameters())
    buffers = sum(buffer.numel() for buffer in lm.buffers())
    # Quantized weights are packed: sixteen of two bits in an int32.
    if needed > 16 * held or buffers > max(8 * held, _LARGE_BUFFERS):
        raise config.error(f"describes a model of {needed + buffers} numbers, its weights are {held}")


def _check_dtypes(lm: PreTrainedModel, files: _Files) -> None:
    """Refuse weights that are stored as other than floating-point numbers, which would be cast in silence."""
    prefix = f"{lm.base_model_prefix}."  # which files of the bare trunk do not have
    parameters = {name.removeprefix(prefix) for name, _ in lm.named_parameters()}
    for path, headers in files.items():
        for name, header in headers.items():
            if name.removeprefix(prefix) in parameters and not header.dtype.startswith(("F", "BF")):
                raise FileError(path, f"holds {name} as {header.dtype}, expected floating-point numbers", REMEDY)


def _fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All fields of a configuration and of the configurations in it, but for how weights are quantized."""
    for name, value in content.items():
        yield name, value
        if isinstance(value, Mapping) and name != "quantization_config":
            yield from _fields(value)
