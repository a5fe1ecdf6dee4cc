"""Save and load language models and value heads: a plain Hugging Face folder with a few more files, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchrl_lang._files import (
    CHECKSUMS,
    Fields,
    FileError,
    check_replaceable,
    non_finite,
    verify_checksums,
    write_checksums,
    write_folder,
)
from torchrl_lang.modules.actor import split_actor
from torchrl_lang.modules.language_model import load_causal_lm, quiet_transformers
from torchrl_lang.modules.merging import base_module, merged_copy
from torchrl_lang.modules.saved_heads import HEADS, describe_heads, own_head, read_heads, write_heads
from torchrl_lang.modules.trunk import Trunk, unwrapped
from torchrl_lang.text.transformers_tokenizer import write_tokenizer

__all__ = [
    "CARD",
    "MANIFEST",
    "SavedModel",
    "language_model_around",
    "language_model_of",
    "load_language_model",
    "read_model",
    "save_language_model",
    "write_model",
]

MANIFEST = "torchrl_lang.json"
"""Name of the file that describes the heads and the tokenizer."""

CARD = "README.md"
"""Name of the model card."""

_VALUE_LM = "value_lm"
_VERSION = 2  # 1, without the field: folders without checksums
_REMEDY = "save the model again, or copy the folder again"


class SavedModel(NamedTuple):
    """The result of :func:`load_language_model`."""

    lm: PreTrainedModel
    """The language model."""
    heads: dict[str, Any]
    """Value heads, embeddings of returns and of features, by the names of saving; tied ones are tied to ``lm``."""
    tokenizer: dict[str, Any] | None
    """Configuration of the tokenizer, if one was saved."""
    value_lm: PreTrainedModel | None = None
    """A second model: the one whose states the heads read, or whose token probabilities are values (Q-SFT)."""


def save_language_model(
    folder: str | Path,
    lm: PreTrainedModel | ProbabilisticTensorDictSequential | Any,
    heads: Mapping[str, nn.Module] | None = None,
    *,
    tokenizer: Mapping[str, Any] | None = None,
    value_lm: PreTrainedModel | None = None,
) -> Path:
    """Write a language model and its value heads to ``folder``, atomically.

    The language model is written by ``save_pretrained`` and the tokenizer as one of transformers, so other programs can
    load both, see :func:`~torchrl_lang.text.write_tokenizer`. The heads are written to ``heads.safetensors``, their
    shapes and the tokenizer's configuration to ``torchrl_lang.json``, and the SHA-256 of every file to
    ``checksums.json``.

    PEFT adapters are merged, in a copy, into the weights: the folder contains a plain model that computes the same.

    Args:
        folder: created if it does not exist. A saved model is replaced when the new one is complete; other folders are
            not changed. One process at a time may write it.
        lm: a language model, with or without PEFT's ``PeftModel`` around it, or an actor over one.
        heads: value heads by name, such as ``{"qvalue": …, "target_qvalue": …, "value": …}``; likewise a
            :class:`~torchrl_lang.modules.ReturnEmbedding` or a :class:`~torchrl_lang.modules.FeatureEmbedding`. Of a
            module of another class the weights are written; loading needs one to fill, ``heads={name: module}``.
        tokenizer: ``tokenizer.config()``.
        value_lm: a second model, written to a folder within, whose states the heads read in place of those of ``lm``;
            without heads one whose token probabilities are values.

    Raises:
        ValueError: the actor's trunk is not a Hugging Face model, so there is no plain format for it; a head is tied to
            the embedding of another model; or some weights are not finite.
        FileExistsError: ``folder`` contains other files than a saved model's.

    Examples:
        >>> import tempfile
        >>> from torchrl_lang.modules import ValueHead, causal_lm, load_language_model, save_language_model
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = load_language_model(save_language_model(folder, lm, {"value": ValueHead(8)}))
        >>> sorted(saved.heads), saved.lm.config.vocab_size
        (['value'], 11)
    """
    described = {"tokenizer": None if tokenizer is None else dict(tokenizer)}
    return write_model(folder, lm, heads or {}, described, value_lm=value_lm)


def write_model(
    folder: str | Path,
    lm: PreTrainedModel | ProbabilisticTensorDictSequential | Any,
    heads: Mapping[str, nn.Module],
    described: Mapping[str, Any],
    *,
    card: str | None = None,
    value_lm: PreTrainedModel | None = None,
) -> Path:
    """Write a model, its heads, fields of the manifest and a model card; see :func:`save_language_model`."""
    folder, tokenizer = Path(folder), described["tokenizer"]
    heads = {name: own_head(head) for name, head in heads.items()}
    target = folder.resolve()  # replace the folder that a link points to, not the link
    check_replaceable(target, MANIFEST)
    model = language_model_of(lm) if isinstance(lm, ProbabilisticTensorDictSequential) else unwrapped(lm)
    read = model if value_lm is None else unwrapped(value_lm)
    manifest = {"version": _VERSION, "heads": describe_heads(heads, read), **described}
    models = {".": merged_copy(model)}
    if value_lm is not None:
        models[_VALUE_LM] = merged_copy(read)
        manifest[_VALUE_LM] = True
    if wrong := [name for each in models.values() for name in non_finite(each.named_parameters())]:
        raise ValueError(f"The model has weights that are not finite, such as {', '.join(wrong[:3])}: it is not saved.")
    with write_folder(target) as new:
        with quiet_transformers():
            for place, each in models.items():
                each.save_pretrained(new / place)
            if tokenizer is not None:
                write_tokenizer(tokenizer, new)
        write_heads(new / HEADS, heads)
        (new / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if card is not None:
            (new / CARD).write_text(card, encoding="utf-8")
        write_checksums(new)
    return folder


def load_language_model(
    folder: str | Path,
    *,
    heads: Mapping[str, nn.Module] | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> SavedModel:
    """Load a model that :func:`save_language_model` wrote, on the CPU and in evaluation mode.

    All files are compared with their checksums first, which takes about a second per gigabyte. Other Hugging Face
    folders, without heads and checksums, can be loaded, too; see :func:`~torchrl_lang.modules.load_causal_lm` for the
    checks.

    Args:
        folder: the model's folder.
        heads: modules by name for the saved heads of classes that are not this library's, filled in place.
        trust_remote_code: run code that comes with the model, with all rights of this process. Read that code first.
        **kwargs: passed to ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        FileNotFoundError: there is no such folder.
        FileError: a file is missing or damaged, or is not what was saved.
        ValueError: ``heads`` are not those that the folder needs; the message names them.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> from torchrl_lang.modules import causal_lm, load_language_model, save_language_model
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save = save_language_model(folder, lm, {"qvalue": nn.Linear(8, 11)})
        ...     saved = load_language_model(folder, heads={"qvalue": nn.Linear(8, 11)})
        >>> saved.heads["qvalue"]
        Linear(in_features=8, out_features=11, bias=True)
    """
    return read_model(folder, heads, trust_remote_code=trust_remote_code, **kwargs)[0]


def read_model(
    folder: str | Path, given: Mapping[str, nn.Module] | None = None, **kwargs: Any
) -> tuple[SavedModel, Fields | None]:
    """The model in a folder, see :func:`load_language_model`, and the manifest, if this library saved the folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no model in {folder}: it is not a folder.")
    manifest = _read_manifest(folder)
    lm = load_causal_lm(folder, **kwargs)
    if manifest is None:
        return SavedModel(lm, {}, None), None
    value_lm = load_causal_lm(folder / _VALUE_LM, **kwargs) if manifest.take(_VALUE_LM, bool, False) else None
    heads = read_heads(folder / HEADS, manifest.object("heads"), value_lm or lm, given or {}, remedy=_REMEDY)
    tokenizer = manifest.take("tokenizer", dict, None)
    return SavedModel(lm, heads, tokenizer, value_lm), manifest


def _read_manifest(folder: Path) -> Fields | None:
    """The manifest of a folder whose files match their checksums; None if another program saved it."""
    if verified := (folder / CHECKSUMS).exists():
        verify_checksums(folder, remedy=_REMEDY)
    if not (folder / MANIFEST).exists():
        return None
    manifest = Fields.read(folder / MANIFEST, remedy=_REMEDY)
    version = manifest.take("version", int, 1)
    if version not in (1, _VERSION):
        raise FileError(manifest.path, f"has version {version}, this library reads {_VERSION}", "update the library")
    if version == _VERSION and not verified:
        raise FileError(folder / CHECKSUMS, "is missing", _REMEDY)
    return manifest


def language_model_of(actor: ProbabilisticTensorDictSequential) -> PreTrainedModel:
    """The Hugging Face model of an actor, which shares its weights.

    Examples:
        >>> from torchrl_lang.modules import causal_lm, language_actor, language_model_of
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> language_model_of(language_actor(lm)).get_input_embeddings() is lm.get_input_embeddings()
        True
    """
    parts = split_actor(actor)
    trunk = getattr(parts.trunk, "module", None)
    head: nn.Module | None = parts.head.module if isinstance(parts.head, TensorDictModule) else None
    if not isinstance(trunk, Trunk) or not isinstance(base_module(head), nn.Linear):
        raise ValueError(
            "Only an actor of a Trunk and a linear language-model head is a plain Hugging Face model; this one has "
            f"{type(trunk).__name__} and {type(head).__name__}. Save its state_dict with safetensors instead."
        )
    return language_model_around(trunk, head)


def language_model_around(trunk: Trunk, head: nn.Module | None = None) -> PreTrainedModel:
    """The Hugging Face model of a trunk and a head, which shares their weights; by default the embeddings are its head.

    Examples:
        >>> from torchrl_lang.modules import Trunk, causal_lm
        >>> from torchrl_lang.modules.saving import language_model_around
        >>> trunk = Trunk(causal_lm("llama", vocab_size=11, layers=1, width=8, heads=2, max_length=16))
        >>> lm = language_model_around(trunk)
        >>> lm.get_output_embeddings().weight is trunk.model.get_input_embeddings().weight
        True
    """
    if trunk.model.is_remote_code():
        raise ValueError(
            f"{type(trunk.model).__name__} is code that came with the model: pass the language model instead of an "
            "actor over it."
        )
    config = deepcopy(trunk.model.config)
    if head is None:
        config.tie_word_embeddings = True
    # An empty model on the meta device, whose two parts are then replaced.
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    setattr(lm, lm.base_model_prefix, trunk.model)
    if head is not None:
        lm.set_output_embeddings(head)
        return lm
    output: Any = lm.get_output_embeddings()
    output.weight = trunk.model.get_input_embeddings().weight
    if output.bias is not None:
        output.bias = nn.Parameter(torch.zeros(output.bias.shape))
    return lm
