"""Give a model a projector of features, which it reads before the tokens of a row."""

from __future__ import annotations

from typing import TypeVar

from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_lang.modules.features import FeatureEmbedding
from torchrl_lang.modules.privileged_trunk import PrivilegedTrunk
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.modules.trunk import Trunk, trunk_of
from torchrl_lang.schema import ATTENTION_MASK, FEATURES, FEATURES_MASK, TOKENS

__all__ = ["with_features"]

Actor = TypeVar("Actor", bound=nn.Module)


def with_features(actor: Actor, embedding: FeatureEmbedding | None) -> Actor:
    """Let the trunk of an actor read the features of rows, in place; the language model itself does not change.

    The modules then read ``features`` float ``[*B, P, F]`` and, where it is there, ``features_mask`` bool ``[*B, P]``,
    beside ``tokens`` and ``attention_mask``. Do this before building a loss. The embedding becomes a part of the trunk,
    so losses train it and the decoding cache notices when it changes. :func:`~torchrl_lang.modules.save_agent` saves
    it with the policy. :func:`~torchrl_lang.modules.save_language_model` writes the language model as without it: pass
    the embedding as the head ``features``, and attach it again after loading, ``with_features(language_actor(saved.lm),
    saved.heads["features"])``.

    Args:
        actor: a language actor or an :class:`~torchrl_lang.modules.UtteranceActor` over a
            :class:`~torchrl_lang.modules.Trunk`; or a trunk of values, a :class:`Trunk` or a module over one, also a
            :class:`~torchrl_lang.modules.PrivilegedTrunk`.
        embedding: moved to the model's device; None removes an embedding.

    Returns:
        The actor.

    Raises:
        ValueError: the actor has no such trunk, the embedding has another width, or ``positions=False`` is asked of a
            model with neither learned nor rotary positions.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_lang.modules import FeatureEmbedding, causal_lm, language_actor, with_features
        >>> lm = causal_lm(vocab_size=11, layers=1, width=8, heads=2, max_length=16)
        >>> actor = with_features(language_actor(lm), FeatureEmbedding(5, 8))
        >>> actor.in_keys
        ['tokens', 'attention_mask', 'features', 'features_mask']
        >>> rows = TensorDict(tokens=torch.zeros(2, 6, dtype=torch.int64), attention_mask=torch.ones(2, 6).bool(),
        ...                   features=torch.randn(2, 3, 5), batch_size=[2])
        >>> actor.get_dist(rows).logits.shape
        torch.Size([2, 6, 11])
    """
    trunk = _trunk(actor)
    if trunk is None:
        raise ValueError(
            "Only the Trunk of a Hugging Face model reads features: build the actor with language_actor()."
        )
    weight = trunk.model.get_input_embeddings().weight
    if embedding is not None:
        _check(embedding, trunk, weight.shape[1])
    trunk.features = None if embedding is None else embedding.to(weight.device)
    for module in actor.modules():
        if isinstance(module, TensorDictModuleBase) and TOKENS in module.in_keys:
            _name_keys(module)
    return actor


def _trunk(actor: nn.Module) -> Trunk | None:
    """The trunk of an actor or of values; None if there is none."""
    inner = actor.trunk if isinstance(actor, PrivilegedTrunk) else actor
    found = inner if isinstance(inner, Trunk) else trunk_of(inner)
    return RowScorer(inner).trunk if found is None else found


def _check(embedding: FeatureEmbedding, trunk: Trunk, width: int) -> None:
    """Raise ValueError where a model cannot read an embedding."""
    if embedding.width != width:
        raise ValueError(
            f"The FeatureEmbedding has width {embedding.width}, but the model's embeddings have {width}: build it with "
            f"width={width}."
        )
    learned = isinstance(getattr(trunk.model, "wpe", None), nn.Embedding)
    rotary = any(name.split(".")[-1] == "rotary_emb" for name, _ in trunk.model.named_modules())
    if not embedding.positions and not learned and not rotary:
        raise ValueError(
            "positions=False needs a model with learned positions, as GPT-2's, or rotary ones, and those of a "
            f"{type(trunk.model).__name__} are others: build the FeatureEmbedding with positions=True."
        )


def _name_keys(module: TensorDictModuleBase) -> None:
    """Let ``in_keys`` name the features where a trunk within reads them."""
    keys = [key for key in module.in_keys if key not in (FEATURES, FEATURES_MASK)]
    if any(isinstance(part, Trunk) and part.features is not None for part in module.modules()):
        place = keys.index(ATTENTION_MASK) + 1
        keys[place:place] = [FEATURES, FEATURES_MASK]
    module.in_keys = keys
