"""The model that offline training begins with: from scratch, pretrained or of a run, as an actor to train."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import nn
from torchrl.objectives import LossModule
from transformers import CONFIG_MAPPING, PreTrainedModel

from torchrl_lang.evaluation import imitation_loss
from torchrl_lang.modules import FeatureEmbedding, UtteranceActor, causal_lm
from torchrl_lang.modules.frozen.frozen_copy import FrozenActor, adapters_off, frozen_copy
from torchrl_lang.modules.hugging_face import adapter_layers
from torchrl_lang.modules.save import FEATURES_HEAD, SavedModel, save_language_model, saved_actor
from torchrl_lang.objectives.values import QValueLoss
from torchrl_lang.recipes.algorithms.offline import OfflineOptions
from torchrl_lang.recipes.initial_model import choose_weights, load_pretrained, load_start
from torchrl_lang.recipes.load_run import RunDecoding
from torchrl_lang.recipes.offline import OfflineData, open_data, train_offline
from torchrl_lang.schema import FEATURES, ControlTokens
from torchrl_lang.text import Tokenizer


class Start(NamedTuple):
    """Data to learn from, and the model at the beginning of training."""

    data: OfflineData
    model: SavedModel
    actor: ProbabilisticTensorDictSequential

    @property
    def control(self) -> ControlTokens:
        """Control tokens of the data."""
        return self.data.dataset.tokenizer.control

    def policy(self, **options: Any) -> UtteranceActor:
        """An utterance actor over the model, with further options."""
        return UtteranceActor(self.actor, self.control, self.data.action_length, **options)

    def reference(self, *, copied: bool = False) -> FrozenActor:
        """The policy as it is now, frozen, which shares the weights that do not train.

        Beside adapters it is the same model without them, which has the projector of features as well, so that this
        does not train either. With ``copied`` it is a model of its own in any case.
        """
        policy = UtteranceActor(saved_actor(self.model), self.control, self.data.action_length)
        if copied or not adapter_layers(policy):
            return frozen_copy(policy)
        for head in self.model.heads.values():
            head.requires_grad_(False)
        return adapters_off(policy)

    def save(self, folder: Path, decoding: RunDecoding | None = None, **heads: Any) -> None:
        """Save the model with further heads, and beside it how they decide."""
        if decoding is not None:
            decoding.save(folder.parent)
        tokenizer = self.data.dataset.tokenizer.config()
        save_language_model(folder, self.model.lm, {**heads, **self.model.heads}, tokenizer=tokenizer)

    def with_target(self, name: str, head: nn.Module, loss: QValueLoss) -> dict[str, Any]:
        """``head``, which a loss trains, as ``name``; and one with its target parameters as ``target_<name>``."""
        other = deepcopy(head)
        other.load_state_dict(loss.target_qvalue_network_params.get("module").to_dict())
        return {f"target_{name}": other, name: head}

    def train(
        self,
        options: Any,
        loss: LossModule,
        policy: TensorDictModuleBase,
        save: Callable[[Path], Any],
        check: Callable[[TensorDictBase], Mapping[str, float]] | None = None,
        **more: Any,
    ) -> float:
        """See :func:`train_offline`; ``check`` is the policy's imitation of held-out rows, and targets follow tau."""

        def imitation(rows: TensorDictBase) -> dict[str, float]:
            return {"held_out_loss": imitation_loss(self.actor, rows)}

        rate = getattr(options, "value_lr", None) or (options.lr if getattr(options, "clip_heads", False) else None)
        if rate is not None:
            own = {*self.actor.parameters(), *self.model.lm.parameters()}
            heads = nn.ParameterList(p for p in loss.parameters() if p.requires_grad and p not in own)
            more["rates"] = ((heads, rate),)
        tau = getattr(options, "tau", None)
        return train_offline(options, self.data, loss, policy, save, check or imitation, tau=tau, **more)


def begin(options: OfflineOptions, data: OfflineData | None = None, *, unchanged: bool = False) -> Start:
    """Open the data, seed everything and build the model to train.

    Args:
        options: of the recipe.
        data: already opened.
        unchanged: whether the algorithm measures its policy against the initial one, which must then be trained.

    Raises:
        ValueError: there is no model to start from, or it has other tokens than the data or reads other features.
    """
    data = open_data(options) if data is None else data
    if unchanged and options.start is None and options.pretrained is None:
        raise ValueError(f"{options.algorithm} starts from a policy that imitates the data: give --start, a run of BC.")
    torch.manual_seed(options.seed)
    model = build_model(options, data, unchanged=unchanged)
    groups: Any = "auto" if options.length_groups is None else options.length_groups
    actor = saved_actor(model, length_groups=groups, compile=options.compile)
    if options.checkpointing:
        actor[0].module.gradient_checkpointing()
    choose_weights(model.lm, options)
    return Start(data, model, actor)


def loss_options(options: Any, kind: type[LossModule], **more: Any) -> dict[str, Any]:
    """The keyword arguments of a loss: the options that it has a parameter for, and ``more``.

    Examples:
        >>> from pathlib import Path
        >>> from torchrl_lang.objectives import BCLoss
        >>> from torchrl_lang.recipes.algorithms import BC
        >>> from torchrl_lang.recipes.models import loss_options
        >>> loss_options(BC(data=Path("d"), out=Path("o")), BCLoss, actor_normalizer="action")
        {'transition_weight': 1.0, 'actor_normalizer': 'action'}
    """
    names = set[str]()
    for base in kind.__mro__:  # further bases only for what a class hands on as **options
        parameters = inspect.signature(base).parameters
        names |= parameters.keys()
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    fields = [field.name for field in dataclasses.fields(options)]
    return {name: getattr(options, name) for name in fields if name in names} | more


def build_model(options: OfflineOptions, data: OfflineData, *, unchanged: bool = False) -> SavedModel:
    """The model to train: from scratch, of a finished run, or a pretrained one fitted to the tokenizer.

    Where the rows have features, it has a projector of them as its head ``features``: that of the run, else a new one.

    Args:
        options: of the recipe.
        data: episodes to learn from.
        unchanged: whether the initial policy counts, so that a new projector of features would do harm.

    Raises:
        ValueError: the run has another tokenizer than the data or reads other features, or is a decision transformer;
            or options or the recipe do not go together with the features.
    """
    device, tokenizer, width = options.torch_device(), data.dataset.tokenizer, _width_of_features(data)
    if options.start is not None:
        model = model_of_start(options.start, data, options)
    elif options.pretrained is not None:
        model = SavedModel(load_pretrained(options.pretrained, tokenizer, options), {}, tokenizer.config())
    else:
        model = SavedModel(_new_lm(options, data).to(options.loaded_dtype()), {}, tokenizer.config())
    model.lm.to(device)
    if width is None or FEATURES_HEAD in model.heads:
        if options.features_hidden or not options.feature_positions:
            reason = "the data have none" if width is None else f"{options.start} has its own"
            raise ValueError(f"Leave out --features-hidden and --no-feature-positions of new projectors: {reason}.")
        return model
    if unchanged:
        raise ValueError("The model of --start does not read the features of the data: give a run of BC that does.")
    embeddings = model.lm.get_input_embeddings().weight.shape[1]
    sizes: Any = {"hidden": options.features_hidden, "positions": options.feature_positions}
    return model._replace(heads={FEATURES_HEAD: FeatureEmbedding(width, embeddings, **sizes)})


def model_of_start(folder: Path, data: OfflineData, options: OfflineOptions) -> SavedModel:
    """The language model in a folder, see :func:`load_start`, and its projector of features, if it has one.

    Raises:
        ValueError: it has another tokenizer than the data or reads other features, or is a decision transformer.
    """
    model = load_start(folder, data.dataset.tokenizer, options)
    embedding: Any = model.heads.get(FEATURES_HEAD)
    width = _width_of_features(data)
    if embedding is not None and embedding.features != width:
        widths = f"width {embedding.features}, those of the data have width {width}"
        raise ValueError(f"The model in {folder} reads features of {widths}: start from another one.")
    return SavedModel(model.lm, {} if embedding is None else {FEATURES_HEAD: embedding}, None)


def _width_of_features(data: OfflineData) -> int | None:
    """``F``, the width of the features of the rows; None if they have none."""
    features = data.dataset.rows.get(FEATURES, None)
    return None if features is None else int(features.shape[-1])


def _new_lm(options: OfflineOptions, data: OfflineData) -> PreTrainedModel:
    """A language model from scratch, with positions for the rows and their features."""
    if options.kind not in CONFIG_MAPPING:
        raise ValueError(f"--kind {options.kind} is no model type of Hugging Face: give gpt2, llama, qwen2 or another.")
    rows = data.dataset.rows
    features = rows.get(FEATURES, None)
    places = 0 if features is None or not options.feature_positions else features.shape[-2]
    # Without games it must be able to read another utterance after the longest dialogue.
    length = places + rows["tokens"].shape[-1] + (data.action_length if data.task is None else 0)
    return new_lm(data.dataset.tokenizer, length, options.kind, **options.sizes)


def new_lm(tokenizer: Tokenizer, max_length: int, kind: str = "gpt2", *, width: int, **sizes: int) -> PreTrainedModel:
    """A :func:`~torchrl_lang.modules.causal_lm` whose initial weights have a standard deviation of ``width ** -0.5``.

    Hugging Face's 0.02 is meant for widths near a thousand; in a narrow model it makes activations vanish.
    """
    config: Any = {"max_length": max_length, "pad": tokenizer.control.pad, "initializer_range": width**-0.5}
    return causal_lm(kind, vocab_size=tokenizer.vocab_size, width=width, **sizes, **config)
