"""The model that offline training begins with: from scratch, pretrained or of a run, and its projector of features."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, PreTrainedModel

from torchrl_lang.modules import FeatureEmbedding, SavedModel, fit_vocabulary, load_causal_lm
from torchrl_lang.modules.save import FEATURES_HEAD
from torchrl_lang.recipes.load_run import load_model, refuse_returns
from torchrl_lang.recipes.new_model import new_lm
from torchrl_lang.recipes.options import read_options
from torchrl_lang.schema import FEATURES

if TYPE_CHECKING:
    from torchrl_lang.recipes.offline import OfflineData, OfflineOptions

__all__ = ["build_model", "model_of_run"]


def build_model(options: OfflineOptions, data: OfflineData, *, as_it_is: bool = False) -> SavedModel:
    """The model to train: from scratch, of a finished run, or a pretrained one fitted to the tokenizer.

    Where the rows have features, it has a projector of them as its head ``features``: that of the run, else a new one.

    Args:
        options: of the recipe.
        data: episodes to learn from.
        as_it_is: whether the recipe uses the model as it is at the beginning, so that a new projector would do harm.

    Raises:
        ValueError: the run has another tokenizer than the data or reads other features, or is a decision transformer;
            or options or the recipe do not go together with the features.
    """
    device, tokenizer, width = options.torch_device(), data.dataset.tokenizer, _width_of_features(data)
    if options.start is not None:
        model = model_of_run(options.start, data)
        model.lm.to(device)
    else:
        if options.pretrained is None:
            lm = _new_lm(options, data)
        else:
            lm = fit_vocabulary(load_causal_lm(options.pretrained), tokenizer.vocab_size, shrink=True)
        model = SavedModel(lm.to(device), {}, tokenizer.config())
    if width is None or FEATURES_HEAD in model.heads:
        _check_unused(options, "the data have none" if width is None else f"{options.start} has its own")
        return model
    if as_it_is:
        raise ValueError(
            f"{type(options).__name__} uses the model that it starts from as it is, and this one does not read the "
            f"features of the data: give a run of BC on data with features with --start RUN."
        )
    return model._replace(heads={FEATURES_HEAD: _new_projector(options, model.lm, width)})


def model_of_run(folder: Path, data: OfflineData) -> SavedModel:
    """The language model of a finished run, with the tokens of the data, and its projector of features, if it has one.

    Raises:
        ValueError: the run has another tokenizer than the data or reads other features, or is a decision transformer.
    """
    model, own = load_model(folder)
    refuse_returns(folder, model)
    if own.config() != data.dataset.tokenizer.config():
        about = read_options(folder / "config.json").object("notes").take("task", str)
        raise ValueError(f"The run in {folder} is about {about}, which has other tokens than the data.")
    embedding: Any = model.heads.get(FEATURES_HEAD)
    width = _width_of_features(data)
    if embedding is not None and embedding.features != width:
        found = "the data have none" if width is None else f"those of the data have width {width}"
        raise ValueError(
            f"The run in {folder} reads features of width {embedding.features}, but {found}: start from another run, "
            "or give data with the features that it reads."
        )
    return SavedModel(model.lm, {} if embedding is None else {FEATURES_HEAD: embedding}, model.tokenizer)


def _width_of_features(data: OfflineData) -> int | None:
    """``F``, the width of the features of the rows; None if they have none."""
    features = data.dataset.rows.get(FEATURES, None)
    return None if features is None else int(features.shape[-1])


def _new_lm(options: OfflineOptions, data: OfflineData) -> PreTrainedModel:
    """A language model from scratch, with positions for the rows and their features."""
    if options.kind not in CONFIG_MAPPING:
        raise ValueError(f"kind={options.kind!r} is no model type of Hugging Face: give gpt2, llama, qwen2 or another.")
    rows, tokenizer = data.dataset.rows, data.dataset.tokenizer
    features = rows.get(FEATURES, None)
    places = 0 if features is None or not options.feature_positions else features.shape[-2]
    return new_lm(
        options.kind,
        vocab_size=tokenizer.vocab_size,
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        max_length=places + rows["tokens"].shape[-1] + data.evaluation.room,
        pad=tokenizer.control.pad,
    )


def _new_projector(options: OfflineOptions, lm: PreTrainedModel, width: int) -> FeatureEmbedding:
    embeddings = lm.get_input_embeddings().weight.shape[1]
    return FeatureEmbedding(width, embeddings, hidden=options.features_hidden, positions=options.feature_positions)


def _check_unused(options: OfflineOptions, reason: str) -> None:
    """Raise ValueError if options of a new projector of features were given where none is built."""
    if options.features_hidden or not options.feature_positions:
        raise ValueError(
            f"features_hidden={options.features_hidden} and feature_positions={options.feature_positions} are for a "
            f"new projector of features, and {reason}: leave them out."
        )
