"""Language models and value heads on disk: a plain Hugging Face folder with one file of heads beside it, no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from torchrl_lang.modules.action_values import ActionValueHead
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.language_model import load_causal_lm
from torchrl_lang.modules.qvalue_head import QValueHead
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead
from torchrl_lang.modules.trunk import Trunk
from torchrl_lang.modules.value_head import ValueHead

__all__ = ["SavedModel", "language_model_of", "load_language_model", "save_language_model"]

_HEADS = "heads.safetensors"
_MANIFEST = "torchrl_lang.json"
_KINDS: dict[str, Callable[..., ActionValueHead | ValueHead]] = {
    kind.__name__: kind for kind in (QValueHead, TiedQValueHead, ValueHead)
}


class SavedModel(NamedTuple):
    """What :func:`load_language_model` finds in a folder."""

    lm: PreTrainedModel
    """The language model."""
    heads: dict[str, ActionValueHead | ValueHead]
    """Value heads by the name they were saved under; tied ones are tied to ``lm``."""
    tokenizer: dict[str, Any] | None
    """Configuration of the tokenizer, where one was saved."""


def save_language_model(
    folder: str | Path,
    lm: PreTrainedModel | ProbabilisticTensorDictSequential,
    heads: Mapping[str, ActionValueHead | ValueHead] | None = None,
    *,
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Write a language model and its value heads into ``folder``; files of the same names are replaced.

    The language model is written by ``save_pretrained``: anything that reads Hugging Face folders reads it. The heads
    go to ``heads.safetensors``, their shapes and the tokenizer's configuration to ``torchrl_lang.json``.

    Args:
        folder: made where it does not exist.
        lm: a language model, or an actor over one.
        heads: value heads by name, such as ``{"qvalue": …, "target_qvalue": …, "value": …}``.
        tokenizer: ``tokenizer.config()``.

    Raises:
        ValueError: the actor's trunk is no Hugging Face model, so there is no plain format for it; or a head is tied to
            the embedding of another model.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.modules import ValueHead, causal_lm, load_language_model, save_language_model
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = load_language_model(save_language_model(folder, lm, {"value": ValueHead(8)}))
        >>> sorted(saved.heads), saved.lm.config.vocab_size
        (['value'], 11)
    """
    folder, heads = Path(folder), dict(heads or {})
    model = lm if isinstance(lm, PreTrainedModel) else language_model_of(lm)
    fields = {
        name: {"class": type(head).__name__, **head.config(), **_tie(name, head, model)} for name, head in heads.items()
    }
    empty = [name for name, head in heads.items() if not head.state_dict()]
    if empty:
        raise ValueError(
            f"The heads {empty} hold no weights: a loss keeps those of its networks in tensordicts. Build a head of "
            "the same class from head.config() and load, for instance, "
            "loss.target_qvalue_network_params.get('module').to_dict() into it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _without_progress_bars():
        model.save_pretrained(folder)
    weights = {f"{name}.{key}": value for name, head in heads.items() for key, value in head.state_dict().items()}
    save_file({key: value.detach().cpu().contiguous() for key, value in weights.items()}, folder / _HEADS)
    manifest = {
        "heads": fields,
        "tokenizer": None if tokenizer is None else dict(tokenizer),
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return folder


def load_language_model(folder: str | Path, **kwargs: Any) -> SavedModel:
    """Read what :func:`save_language_model` wrote, on the CPU and in evaluation mode.

    A Hugging Face folder without heads of ours is read as well.

    Args:
        folder: where to look.
        **kwargs: passed to ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        ValueError: the heads do not fit their description.
    """
    folder = Path(folder)
    with _without_progress_bars():
        lm = load_causal_lm(folder, **kwargs)
    if not (folder / _MANIFEST).exists():
        return SavedModel(lm, {}, None)
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    weights = load_file(folder / _HEADS)
    heads: dict[str, ActionValueHead | ValueHead] = {}
    for name, fields in manifest["heads"].items():
        options = dict(fields)
        kind = _KINDS.get(options.pop("class"))
        if kind is None:
            raise ValueError(f"Head {name!r} in {folder} is of the unknown class {fields['class']!r}.")
        if "embedding" in options:
            options["embedding"] = _embedding(lm, options["embedding"])
        head = kind(**options)
        prefix = f"{name}."
        head.load_state_dict({key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)})
        heads[name] = head.eval()
    return SavedModel(lm, heads, manifest["tokenizer"])


def _tie(name: str, head: nn.Module, lm: PreTrainedModel) -> dict[str, str]:
    """Which of the language model's embeddings a tied head reads."""
    if not isinstance(head, TiedQValueHead):
        return {}
    for which in ("output", "input"):
        if getattr(_embedding(lm, which), "weight", None) is head.embedding.weight:
            return {"embedding": which}
    raise ValueError(
        f"Head {name!r} is tied to an embedding that is not in the language model to save: save it with its own."
    )


def _embedding(lm: PreTrainedModel, which: str) -> nn.Module:
    return lm.get_input_embeddings() if which == "input" else lm.get_output_embeddings()


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Checkpoints are written often; a bar for each would drown what the caller shows."""
    shown = logging.is_progress_bar_enabled()
    try:
        logging.disable_progress_bar()
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def language_model_of(actor: ProbabilisticTensorDictSequential) -> PreTrainedModel:
    """The Hugging Face model behind an actor, sharing its weights.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor, language_model_of
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> language_model_of(language_actor(lm)).get_input_embeddings() is lm.get_input_embeddings()
        True
    """
    parts = split_actor(actor)
    trunk = getattr(parts.trunk, "module", None)
    head: nn.Module | None = parts.head.module if isinstance(parts.head, TensorDictModule) else None
    if not isinstance(trunk, Trunk) or not isinstance(head, nn.Linear):
        raise ValueError(
            "Only an actor of a Trunk and a linear language-model head is a plain Hugging Face model; this one has "
            f"{type(trunk).__name__} and {type(head).__name__}. Save its state_dict with safetensors instead."
        )
    # A fresh shell without memory, whose two parts are then replaced by the actor's.
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(deepcopy(trunk.model.config))
    setattr(lm, lm.base_model_prefix, trunk.model)
    lm.set_output_embeddings(head)
    return lm
