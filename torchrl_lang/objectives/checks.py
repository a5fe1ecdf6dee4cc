"""Checks of a loss's networks and options, in its constructor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrl.objectives import LossModule, ValueEstimators

from torchrl_lang._checks import within
from torchrl_lang.modules.actor import split_actor, vocabulary_size
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.row_scoring import RowScorer
from torchrl_lang.modules.trunk import trunk_of

__all__ = [
    "check_actor",
    "check_discounts",
    "check_token",
    "model_vocabulary",
    "set_estimator",
    "state_width",
    "token_limit",
    "vocabulary",
]


def check_actor(loss: str, actor: Any, *, guidance: bool = False) -> None:
    """Raise unless ``actor`` is a language actor or an utterance actor over one, guided by values only if allowed."""
    if not isinstance(actor, UtteranceActor):
        try:
            split_actor(actor)
        except TypeError:
            raise TypeError(
                f"{loss} needs actor_network as a language actor or an UtteranceActor over one, got "
                f"{type(actor).__name__}: build it with language_actor(lm)."
            ) from None
        return
    if actor.decoder.rule.guidance is not None and not guidance:
        raise ValueError(f"{loss} trains the language model's own distribution: build the actor without guidance=.")


def set_estimator(
    loss: LossModule,
    value_type: ValueEstimators | None,
    known: Mapping[ValueEstimators, Mapping[str, Any]],
    hyperparams: Mapping[str, float],
) -> None:
    """Set what an estimator fixes of a loss, by ``known``, and the discounts and lambdas that it leaves, in [0, 1]."""
    value_type = loss.default_value_estimator if value_type is None else value_type
    if value_type not in known:
        raise ValueError(f"{type(loss).__name__} supports {[str(one) for one in known]}, got {value_type}.")
    fixed = known[value_type]
    clocks = ("gamma", "lmbda", "turn_gamma", "turn_lmbda")
    names = [name for name in clocks if name not in fixed and hasattr(loss, name)]
    unknown = sorted(set(hyperparams) - set(names))
    if unknown:
        raise TypeError(f"Unknown hyperparameters {unknown}: give some of {names}.")
    for name, value in hyperparams.items():
        within(name, value, 0, 1)
    for name, value in {**fixed, **hyperparams}.items():
        setattr(loss, name, value)


def check_discounts(**numbers: float | None) -> None:
    """Raise ValueError unless discounts and lambdas, by name, lie in [0, 1]; None is left to the loss."""
    for name, number in numbers.items():
        if number is not None:
            within(name, number, 0, 1)


def check_token(name: str, token: int | None, actor: Any) -> None:
    """Raise ValueError unless an option is the id of a token of the actor's vocabulary, or None."""
    limit = vocabulary(actor)
    if token is not None and not 0 <= token < (float("inf") if limit is None else limit):
        raise ValueError(f"{name}={token} is no token id: ids lie in [0, {limit}).")


def vocabulary(actor: Any) -> int | None:
    """How many tokens the policy can write; None where it is unknown."""
    if isinstance(actor, UtteranceActor) and actor.decoder.rule.vocab_size is not None:
        return actor.decoder.rule.vocab_size
    size = vocabulary_size(split_actor(RowScorer(actor).language_actor))
    return token_limit(actor) if size is None else size


def token_limit(actor: Any) -> int | None:
    """How many tokens the model can read; None where it is unknown."""
    trunk = RowScorer(actor).trunk
    embedding: nn.Module | None = None if trunk is None else trunk.model.get_input_embeddings()
    number = getattr(embedding, "num_embeddings", None)
    return number if isinstance(number, int) else None


def model_vocabulary(actor: Any) -> int | None:
    """How many tokens the model's head or its embedding has, the larger number; None where the head's is unknown."""
    size = vocabulary_size(split_actor(RowScorer(actor).language_actor))
    return None if size is None else max(size, token_limit(actor) or 0)


def state_width(actor: Any, value_trunk: nn.Module | None) -> int | None:
    """The width of the states that value heads read, of ``value_trunk`` or the actor's; None where it is unknown."""
    parts = split_actor(RowScorer(actor).language_actor)
    module = parts.trunk if value_trunk is None else value_trunk
    trunk = trunk_of(module) or trunk_of(getattr(module, "trunk", None))  # of a PrivilegedTrunk
    if trunk is not None or value_trunk is not None:
        return None if trunk is None else trunk.width
    return getattr(getattr(parts.head, "module", None), "in_features", None)
