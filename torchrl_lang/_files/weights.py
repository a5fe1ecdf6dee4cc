"""Write and read weights, and check those of a Hugging Face model after transformers has read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchrl_lang._files.readers import FileError, read_tensors, shorten


def check_loaded_weights(
    folder: str | Path, model: nn.Module, info: Mapping[str, Any], *, remedy: str, others: bool = False
) -> None:
    """Reject a model that has other weights than those of its files: transformers draws missing ones at random.

    Args:
        folder: of the files, or the model's name.
        model: what ``from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)`` returned.
        info: what it returned with it.
        remedy: what to do, for the error.
        others: the files may hold weights that the model does not have.

    Raises:
        FileError: weights are missing, unexpected, of another shape or not finite.

    Examples:
        >>> from torch import nn
        >>> from torchrl_lang._files import check_loaded_weights
        >>> info = {"missing_keys": {"bias"}, "unexpected_keys": set(), "mismatched_keys": set()}
        >>> check_loaded_weights("model", nn.Linear(2, 3), info, remedy="save it again")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.readers.FileError: model lacks the weights bias, which its configuration describes: ...
    """
    # Tied weights and buffers that older versions wrote are neither missing nor unexpected.
    missing, unexpected = sorted(info["missing_keys"]), [] if others else sorted(info["unexpected_keys"])
    mismatched = sorted(f"{name} {tuple(held)} for {tuple(own)}" for name, held, own in info["mismatched_keys"])
    for found, names in (
        ("lacks the weights {}, which its configuration describes", missing),
        ("holds the weights {}, which are not part of the model that its configuration describes", unexpected),
        ("holds weights of other shapes than its configuration describes: {}", mismatched),
        ("holds weights that are not finite: {}", non_finite(model.named_parameters())),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise FileError(folder, found.format(", ".join(names[:3]) + more), remedy)


def non_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the floating-point tensors that contain NaN or infinity.

    Examples:
        >>> import torch
        >>> from torchrl_lang._files import non_finite
        >>> non_finite([("a", torch.ones(2)), ("b", torch.tensor(torch.inf))])
        ['b']
    """
    return [name for name, tensor in tensors if not _is_finite(tensor.detach())]


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.element_size() == 1 or tensor.is_meta or not tensor.numel():
        return True  # empty or quantized
    # Computing minimum and maximum is ten times as fast as testing every value.
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def write_weights(path: Path, weights: Mapping[str, Tensor], owner: str) -> None:
    """Write weights as safetensors.

    Args:
        path: the file.
        weights: tensors by name.
        owner: what the weights belong to, for the error.

    Raises:
        ValueError: some are not finite.
    """
    if wrong := non_finite(weights.items()):
        found = f"weights that are not finite, such as {', '.join(wrong[:3])}"
        raise ValueError(f"The {owner} has {found}: it is not saved.")
    save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, path)


def read_weights(path: Path, expected: Mapping[str, Tensor], owner: str, *, remedy: str) -> dict[str, Tensor]:
    """The weights in a file, if they have the names and shapes of ``expected``, which may be on the meta device.

    Args:
        path: a safetensors file.
        expected: tensors by name.
        owner: what the weights belong to, in the possessive case, for error messages.
        remedy: what the user can do if the file cannot be read, for error messages.

    Raises:
        FileError: the file is damaged, holds other tensors, or some are not finite floating-point numbers.
    """
    weights = read_tensors(path, remedy=remedy)
    shapes = {key: tuple(value.shape) for key, value in expected.items()}
    held = {key: tuple(value.shape) for key, value in weights.items()}
    if differ := sorted(key for key in held.keys() | shapes.keys() if held.get(key) != shapes.get(key)):
        found = ", ".join(f"{key} {held.get(key, 'is missing')}, expected {shapes.get(key, 'none')}" for key in differ)
        raise FileError(path, f"does not hold the {owner} tensors: {found[:300]}", remedy)
    wrong = [key for key, value in weights.items() if value.is_floating_point() < expected[key].is_floating_point()]
    if wrong := wrong or non_finite(weights.items()):
        raise FileError(path, f"holds weights that are not finite floating-point numbers: {wrong[0]}", remedy)
    return weights


def check_model_config(content: Mapping[str, Any], path: str | Path, *, remedy: str) -> None:
    """Reject fields that refer to files or code outside the folder, and dtypes that weights cannot have.

    Args:
        content: of a ``config.json``.
        path: the file.
        remedy: what to do about another dtype or another file of weights, for the error.

    Raises:
        FileError: there is such a field.

    Examples:
        >>> from torchrl_lang._files import check_model_config
        >>> check_model_config({"attn_implementation": "a/kernel"}, "config.json", remedy="save the model again")
        Traceback (most recent call last):
            ...
        torchrl_lang._files.readers.FileError: config.json asks for code from elsewhere: ...
    """
    if "transformers_weights" in content:
        raise FileError(path, f"names another file of weights, {shorten(content['transformers_weights'])}", remedy)
    for name, value in nested_fields(content):
        if name.endswith("_implementation") and "/" in str(value):
            raise FileError(path, f"asks for code from elsewhere: {name} is {shorten(value)}", "delete the field")
        if name in ("dtype", "torch_dtype") and value not in (None, "auto"):
            dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise FileError(path, f'has {shorten(value)} as "{name}", expected a dtype such as "float32"', remedy)


def nested_fields(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All fields of a configuration, including nested ones, except those of quantization.

    Args:
        content: the content of a ``config.json``.

    Yields:
        Names and values.

    Examples:
        >>> from torchrl_lang._files import nested_fields
        >>> [name for name, _ in nested_fields({"text_config": {"n_layer": 2}, "dtype": "float32"})]
        ['text_config', 'n_layer', 'dtype']
    """
    for name, value in content.items():
        yield name, value
        if isinstance(value, Mapping) and name != "quantization_config":
            yield from nested_fields(value)
