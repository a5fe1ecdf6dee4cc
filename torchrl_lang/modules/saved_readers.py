"""The models of a saved one with the projectors of features that were saved beside them."""

from __future__ import annotations

from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn

from torchrl_lang.modules.actor import language_actor
from torchrl_lang.modules.saving import SavedModel
from torchrl_lang.modules.trunk import HIDDEN_PRE_NORM, Trunk
from torchrl_lang.modules.with_features import with_features

__all__ = ["FEATURES_HEAD", "VALUE_FEATURES_HEAD", "saved_actor", "saved_value_actor", "saved_value_trunk"]

FEATURES_HEAD = "features"
"""Name of the head that projects features for the language model, see :func:`~torchrl_lang.modules.with_features`."""
VALUE_FEATURES_HEAD = "value_features"
"""Likewise for the model of values."""


def saved_actor(saved: SavedModel, **options: Any) -> ProbabilisticTensorDictSequential:
    """The language actor of a saved model, with its projector of features if it has one.

    Args:
        saved: the model, its weights are shared.
        **options: of :func:`~torchrl_lang.modules.language_actor`; ``expose_pre_norm`` where a head reads it.

    Examples:
        >>> from torchrl_lang.modules import FeatureEmbedding, SavedModel, causal_lm
        >>> from torchrl_lang.modules.saved_readers import saved_actor
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> saved_actor(SavedModel(lm, {"features": FeatureEmbedding(5, 8)}, None)).in_keys
        ['tokens', 'attention_mask', 'features', 'features_mask']
    """
    features: Any = saved.heads.get(FEATURES_HEAD)
    pre_norm = saved.value_lm is None and any(map(_reads_pre_norm, saved.heads.values()))
    return with_features(language_actor(saved.lm, **{"expose_pre_norm": pre_norm, **options}), features)


def saved_value_actor(saved: SavedModel) -> ProbabilisticTensorDictSequential:
    """Likewise the language actor of its model of values, which it has."""
    features: Any = saved.heads.get(VALUE_FEATURES_HEAD)
    return with_features(language_actor(saved.value_lm), features)


def saved_value_trunk(saved: SavedModel, *heads: nn.Module | None) -> Trunk | None:
    """The trunk of its model of values, as these heads read it; None if it has no such model."""
    if saved.value_lm is None:
        return None
    pre_norm = any(map(_reads_pre_norm, heads))
    features: Any = saved.heads.get(VALUE_FEATURES_HEAD)
    return with_features(Trunk(saved.value_lm, expose_pre_norm=pre_norm), features)


def _reads_pre_norm(head: nn.Module | None) -> bool:
    return HIDDEN_PRE_NORM in (getattr(head, "in_key", None), *getattr(head, "in_keys", ()))
