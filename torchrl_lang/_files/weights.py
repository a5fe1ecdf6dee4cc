"""Check the weights of a Hugging Face model after transformers has read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_lang._files.readers import FileError, shorten


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
