"""The models of a saved one with the projectors of features that were saved beside them."""

from __future__ import annotations

from typing import Any

from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn

from torchrl_lang.modules.actor import language_actor
from torchrl_lang.modules.saving import SavedModel
from torchrl_lang.modules.trunk import HIDDEN_PRE_NORM, Trunk
from torchrl_lang.modules.with_prefix import with_prefix

__all__ = ["PREFIX_HEAD", "VALUE_PREFIX_HEAD", "saved_actor", "saved_value_actor", "saved_value_trunk"]

PREFIX_HEAD = "prefix"
"""Name of the head that projects features for the language model, see :func:`~torchrl_lang.modules.with_prefix`."""
VALUE_PREFIX_HEAD = "value_prefix"
"""Likewise for the model of values."""


def saved_actor(saved: SavedModel, **options: Any) -> ProbabilisticTensorDictSequential:
    """The language actor of a saved model, with its projector of features if it has one.

    Args:
        saved: the model, its weights are shared.
        **options: of :func:`~torchrl_lang.modules.language_actor`; ``expose_pre_norm`` where a head reads it.

    Examples:
        >>> from torchrl_lang.modules import PrefixEmbedding, SavedModel, causal_lm
        >>> from torchrl_lang.modules.saved_readers import saved_actor
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> saved_actor(SavedModel(lm, {"prefix": PrefixEmbedding(5, 8)}, None)).in_keys
        ['tokens', 'attention_mask', 'prefix', 'prefix_mask']
    """
    prefix: Any = saved.heads.get(PREFIX_HEAD)
    pre_norm = saved.value_lm is None and any(map(_reads_pre_norm, saved.heads.values()))
    return with_prefix(language_actor(saved.lm, **{"expose_pre_norm": pre_norm, **options}), prefix)


def saved_value_actor(saved: SavedModel) -> ProbabilisticTensorDictSequential:
    """Likewise the language actor of its model of values, which it has."""
    prefix: Any = saved.heads.get(VALUE_PREFIX_HEAD)
    return with_prefix(language_actor(saved.value_lm), prefix)


def saved_value_trunk(saved: SavedModel, *heads: nn.Module | None) -> Trunk | None:
    """The trunk of its model of values, as these heads read it; None if it has no such model."""
    if saved.value_lm is None:
        return None
    pre_norm = any(map(_reads_pre_norm, heads))
    prefix: Any = saved.heads.get(VALUE_PREFIX_HEAD)
    return with_prefix(Trunk(saved.value_lm, expose_pre_norm=pre_norm), prefix)


def _reads_pre_norm(head: nn.Module | None) -> bool:
    return HIDDEN_PRE_NORM in (getattr(head, "in_key", None), *getattr(head, "in_keys", ()))
