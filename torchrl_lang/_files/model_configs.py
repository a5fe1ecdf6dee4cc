"""Check the configuration of a Hugging Face model before transformers reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchrl_lang._files.errors import FileError, shorten
from torchrl_lang._files.fields import Fields

__all__ = ["check_model_config", "nested_fields"]


def check_model_config(config: Fields) -> None:
    """Reject fields that refer to files or code outside the folder, and dtypes that weights cannot have.

    Args:
        config: the content of a ``config.json``.

    Raises:
        FileError: there is such a field.

    Examples:
        >>> from torchrl_lang._files import Fields, check_model_config
        >>> config = Fields({"attn_implementation": "someone/kernel"}, "config.json", "save the model again")
        >>> check_model_config(config)
        Traceback (most recent call last):
            ...
        torchrl_lang._files.errors.FileError: config.json asks for code from elsewhere: ...
    """
    if "transformers_weights" in config.content:
        raise config.error(f"names another file of weights, {shorten(config.content['transformers_weights'])}")
    for name, value in nested_fields(config.content):
        if name.endswith("_implementation") and "/" in str(value):
            raise FileError(
                config.path, f"asks for code from elsewhere: {name} is {shorten(value)}", "delete the field"
            )
        if name in ("dtype", "torch_dtype") and value not in (None, "auto"):
            dtype = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise config.error(f'has {shorten(value)} as "{name}", expected a dtype such as "float32"')


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
