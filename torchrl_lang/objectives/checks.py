"""Checks of a loss's networks and options, in its constructor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import NestedKey
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.objectives import LossModule, ValueEstimators

from torchrl_lang.functional.checks import within
from torchrl_lang.modules.actor import split_actor, vocabulary_size
from torchrl_lang.modules.decoding.utterance_actor import UtteranceActor
from torchrl_lang.modules.row_scoring import RowScorer

__all__ = [
    "check_actor",
    "check_discounts",
    "check_head",
    "check_token",
    "check_vocabularies",
    "set_estimator",
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


def check_head(loss: str, name: str, network: Any, key: NestedKey | None = None) -> None:
    """Raise unless the head ``name`` of a loss is a module of tensordicts that writes ``key`` (None: any one entry)."""
    builder = name.replace("_network", "_module")
    if not isinstance(network, TensorDictModuleBase):
        raise TypeError(
            f"{loss} needs {name} as a TensorDictModule with keys, got {type(network).__name__}: wrap it, "
            f"{builder}(head)."
        )
    if key is not None and key not in network.out_keys:
        raise ValueError(
            f"{loss} reads {key!r} of its {name}, which writes {list(network.out_keys)}: give it "
            f"out_keys=[{key!r}], as {builder}(head) does."
        )


def check_vocabularies(actor: Any, qvalue_network: Any) -> None:
    """Raise ValueError where there are tokens that the policy can write and that Q has no value for."""
    known, needed = getattr(getattr(qvalue_network, "module", None), "vocab_size", None), vocabulary(actor)
    if known is not None and needed is not None and known < needed:
        raise ValueError(
            f"The Q network has values for {known} tokens and the policy can write {needed}: build the head with "
            f"vocab_size={needed}. Where the model's matrix is larger than its tokenizer's vocabulary, give the loss "
            "an UtteranceActor with vocab_size=, the tokenizer's."
        )


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
