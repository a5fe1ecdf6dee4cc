"""Save and load algorithm-distillation models: weights as safetensors, everything else as JSON, no pickle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from torchrl_lang._files import CHECKSUMS, Fields, FolderFormat, non_finite, read_tensor_headers
from torchrl_lang.algorithm_distillation.ad_transformer import ADTransformer
from torchrl_lang.algorithm_distillation.step_entries import entry_from_json
from torchrl_lang.modules.saved_heads import read_weights

__all__ = ["load_ad_model", "save_ad_model"]

_WEIGHTS, _REMEDY = "model.safetensors", "save the model again, or copy the folder again"
_FORMAT = FolderFormat("ad_model.json", (_WEIGHTS,), remedy=_REMEDY, version=1)
_SIZES = ("context", "episode_length", "width", "layers", "heads")


def save_ad_model(folder: str | Path, model: ADTransformer, *, trained_on: Mapping[str, Any] | None = None) -> Path:
    """Write a model to ``folder``, atomically.

    The weights are written to ``model.safetensors``, the constructor's arguments to ``ad_model.json``, and the SHA-256
    of both to ``checksums.json``.

    Args:
        folder: created if it does not exist. A saved model is replaced when the new one is complete; other folders are
            not changed.
        model: the model.
        trained_on: a description of its training as JSON, such as the numbers of the tasks.

    Raises:
        ValueError: some weights are not finite.
        FileExistsError: ``folder`` contains other files than a saved model's.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.algorithm_distillation import ADTransformer, Discrete, load_ad_model, save_ad_model
        >>> model = ADTransformer(Discrete([9, 9]), Discrete([5]), context=60, episode_length=20, width=8, heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = load_ad_model(save_ad_model(folder, model))
        >>> loaded.config() == model.config()
        True
    """
    target = Path(folder).resolve()  # replace the folder that a link points to, not the link
    weights = model.state_dict()
    if wrong := non_finite(weights.items()):
        raise ValueError(f"The model has weights that are not finite, such as {', '.join(wrong[:3])}: it is not saved.")
    config = {"model": model.config(), "trained_on": dict(trained_on or {})}
    with _FORMAT.write(target, config, replace=True) as new:
        save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, new / _WEIGHTS)
    return Path(folder)


def load_ad_model(folder: str | Path) -> ADTransformer:
    """Load a model that :func:`save_ad_model` wrote, on the CPU and in evaluation mode.

    Raises:
        FileNotFoundError: there is no such model.
        FileError: a file is missing or damaged, or is not what was saved.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.algorithm_distillation import ADTransformer, Discrete, load_ad_model, save_ad_model
        >>> model = ADTransformer(Discrete([9, 9]), Discrete([5]), context=60, episode_length=20, width=8, heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_ad_model(folder + "/model", model)
        ...     load_ad_model(folder + "/model").context
        60
    """
    folder = Path(folder)
    if not (folder / CHECKSUMS).is_file():
        raise FileNotFoundError(f"There is no model in {folder}: {CHECKSUMS} is missing. Save one first.")
    config = _FORMAT.read(folder).object("model")
    if config.at_least("layers", 1) > len(read_tensor_headers(folder / _WEIGHTS, remedy=_REMEDY)):
        raise config.error(f"describes {config.take('layers', int)} layers, more than it has tensors")
    model = _empty_model(config)
    weights = read_weights(folder / _WEIGHTS, model.state_dict(), "model's", remedy=_REMEDY)
    model.load_state_dict({key: value.clone() for key, value in weights.items()}, assign=True)
    return model.eval()


def _empty_model(config: Fields) -> ADTransformer:
    """A model on the meta device, so that sizes from a file cannot exhaust the memory."""
    sizes: dict[str, Any] = {name: config.at_least(name, 1) for name in _SIZES}
    described = [config.take(name, dict) for name in ("observation", "action")]
    try:
        entries = [entry_from_json(entry) for entry in described]
        with torch.device("meta"):
            return ADTransformer(entries[0], entries[1], **sizes)
    except (ValueError, RuntimeError, TypeError) as error:
        raise config.error(f'describes no model as "{config.name}" ({error})') from error
