"""The guidance of a saved agent: its heads, the model of a value trunk of its own, and its strength."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from torchrl_lang._files import Fields
from torchrl_lang.modules.actor import UTTERANCE_VALUE
from torchrl_lang.modules.decoding.guidance import ValueGuidance
from torchrl_lang.modules.decoding.likelihood_guidance import LikelihoodGuidance, TokenProbabilities
from torchrl_lang.modules.decoding.utterance_guidance import UtteranceValueGuidance
from torchrl_lang.modules.saved_heads import own_head
from torchrl_lang.modules.saved_readers import VALUE_FEATURES_HEAD, saved_value_actor, saved_value_trunk
from torchrl_lang.modules.saving import SavedModel, language_model_around
from torchrl_lang.modules.tied_qvalue_head import TiedQValueHead
from torchrl_lang.modules.trunk import Trunk, trunk_of
from torchrl_lang.modules.utterance_qvalue_head import UtteranceQValueHead

__all__ = ["SavedGuidance", "read_guidance", "read_options", "saved_guidance"]

_OPTIONS: Mapping[str, type] = {
    "beta": float,
    "weighting": str,
    "clip": float,
    "include_logits": bool,
    "value_min": float,
    "value_max": float,
}


class SavedGuidance(NamedTuple):
    """What is saved of a guidance."""

    options: dict[str, Any] | None
    """Its strength, as JSON; None if there is no guidance."""
    heads: dict[str, nn.Module]
    value_lm: PreTrainedModel | None
    """A model with the weights of the values' own trunk, if they have one."""


def saved_guidance(guidance: ValueGuidance | None) -> SavedGuidance:
    """What to save of a guidance, which shares its weights.

    Raises:
        ValueError: its own trunk is no :class:`Trunk`.

    Examples:
        >>> from torchrl_lang.modules import QValueHead, Trunk, ValueGuidance, causal_lm
        >>> from torchrl_lang.modules.saved_guidance import saved_guidance
        >>> trunk = Trunk(causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16))
        >>> saved = saved_guidance(ValueGuidance(QValueHead(8, 11), beta=4.0, value_trunk=trunk))
        >>> saved.options["beta"], list(saved.heads), type(saved.value_lm).__name__
        (4.0, ['qvalue'], 'GPT2LMHeadModel')
    """
    if guidance is None:
        return SavedGuidance(None, {}, None)
    options = {name: getattr(guidance, name) for name in _OPTIONS}
    heads: dict[str, nn.Module | None] = {"value": guidance.value}
    if isinstance(guidance, UtteranceValueGuidance):
        options["values"] = UTTERANCE_VALUE
    if isinstance(guidance, LikelihoodGuidance):
        options["ratio"] = guidance.ratio
    else:
        heads["qvalue"] = guidance.qvalue
    value_lm = None
    if guidance.value_trunk is not None:
        trunk = trunk_of(guidance.value_trunk)
        if trunk is None:
            raise ValueError(
                f"The values' own trunk is a {type(guidance.value_trunk).__name__}: only a Trunk of a Hugging Face "
                "model is saved."
            )
        heads[VALUE_FEATURES_HEAD] = trunk.features
        value_lm = _model_of_values(trunk, guidance.qvalue)
    return SavedGuidance(options, {name: own_head(head) for name, head in heads.items() if head is not None}, value_lm)


def read_guidance(saved: SavedModel, agent: Fields) -> ValueGuidance | None:
    """The guidance of a saved agent, whose fields and model these are."""
    if agent.content.get("guidance") is None:
        return None
    fields, heads = agent.object("guidance"), saved.heads
    by_likelihood = "ratio" in fields.content
    if (saved.value_lm if by_likelihood else heads.get("qvalue")) is None:
        raise fields.error(f"describes a guidance whose {'value_lm' if by_likelihood else 'qvalue'!r} is missing")
    if by_likelihood:
        return LikelihoodGuidance(
            saved_value_actor(saved), beta=fields.take("beta", float), ratio=fields.take("ratio", bool)
        )
    trunk = saved_value_trunk(saved, heads["qvalue"], heads.get("value"))
    if isinstance(heads["qvalue"], UtteranceQValueHead) or fields.content.get("values") == UTTERANCE_VALUE:
        return UtteranceValueGuidance(heads["qvalue"], value_trunk=trunk)
    return ValueGuidance(heads["qvalue"], heads.get("value"), value_trunk=trunk, **read_options(fields, _OPTIONS))


def read_options(fields: Fields, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The saved options; those that are null keep their default, which is None."""
    return {name: fields.take(name, kind) for name, kind in kinds.items() if fields.content.get(name) is not None}


def _model_of_values(trunk: Trunk, qvalue: nn.Module) -> PreTrainedModel:
    """A model with the weights of the values' trunk; its head is the layer that reads it, if one does."""
    if isinstance(qvalue, TokenProbabilities):
        layer: Any = qvalue.head
        return language_model_around(trunk, layer.module)
    head: Any = own_head(qvalue)
    own = not isinstance(head, TiedQValueHead) or head.embedding is trunk.model.get_input_embeddings()
    return language_model_around(trunk, None if own else head.embedding)
