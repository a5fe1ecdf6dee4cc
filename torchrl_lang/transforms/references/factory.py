"""Builds references: an actor is frozen and scored by its kind, everything else is used as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_lang.modules import UtteranceActor, language_actor
from torchrl_lang.modules.frozen.frozen_copy import CurrentPolicy, FrozenActor, HeldActor, frozen_copy
from torchrl_lang.schema import ACTION, TOKENS
from torchrl_lang.transforms.keys import ActionKeys
from torchrl_lang.transforms.references.base import Reference
from torchrl_lang.transforms.references.from_actor import ActorReference
from torchrl_lang.transforms.references.precomputed import ColumnReference, FunctionReference
from torchrl_lang.transforms.references.utterance import UtteranceReference
from torchrl_lang.transforms.references.whole_rows import RowReference
from torchrl_lang.transforms.references.wrapper import WrapperReference, is_wrapper

__all__ = ["as_policy", "as_reference"]


def as_reference(
    reference: Any,
    *,
    in_keys: Sequence[NestedKey] | None = None,
    action_key: NestedKey | Sequence[NestedKey] | None = None,
) -> Reference:
    """Convert an actor, a key or a function to a reference.

    ======================================================  ==========================================================
    given                                                    becomes
    ======================================================  ==========================================================
    a :class:`Reference`                                     itself
    an actor with ``get_dist``                               a frozen copy, scored by the kind of actor:
    ... an :class:`~torchrl_lang.modules.UtteranceActor`     :class:`UtteranceReference`, an utterance a step; for whole
                                                             rows pass ``RowReference(frozen_copy(actor))``
    ... a :func:`~torchrl_lang.modules.language_actor`       :class:`RowReference`, whole rows at temperature 1 over the
                                                             whole vocabulary, which is not how an utterance actor acts
    ... any other                                            :class:`ActorReference`
    a :class:`FrozenActor`                                   the same, with what it shares
    a language-model wrapper of TorchRL                      :class:`WrapperReference`
    a key (string or tuple)                                  :class:`ColumnReference`
    a function of the tensordict                             :class:`FunctionReference`
    ======================================================  ==========================================================

    Args:
        reference: one of these.
        in_keys: the entries that an actor or a function reads, default all that it declares.
        action_key: the key of the action, default as the actor writes it.

    Raises:
        TypeError: it is none of these.
        ValueError: the actor is recurrent and its state cannot be carried, see :class:`ActorReference`.
    """
    if isinstance(reference, Reference) or is_wrapper(reference):
        if in_keys is not None or action_key is not None:
            raise ValueError(f"Give in_keys and action_key to {type(reference).__name__} itself.")
        return reference if isinstance(reference, Reference) else WrapperReference(reference)
    if isinstance(reference, (str, tuple)):
        return ColumnReference(reference)
    if isinstance(reference, TensorDictModuleBase) and hasattr(reference, "get_dist"):
        reference = frozen_copy(reference)
    if isinstance(reference, FrozenActor):
        return _of_actor(reference, in_keys, action_key)
    if callable(reference) and not isinstance(reference, (nn.Module, type)):
        action_keys = None if action_key is None else ActionKeys.of_action(action_key)
        return FunctionReference(reference, in_keys=in_keys or (), action_keys=action_keys)
    what = f"the class {reference.__name__}" if isinstance(reference, type) else type(reference).__name__
    raise TypeError(
        "A reference is an actor with get_dist, a FrozenActor, a Reference, the key of a column, or a function "
        f"tensordict -> log_prob; got {what}. Of an actor-critic pass get_policy_operator(); of a compiled actor the "
        "actor itself; of a module that returns log-probabilities FunctionReference(module)."
    )


def as_policy(policy: Any, *, rows: bool = False) -> Reference:
    """The actor that trains, run without a copy whenever a divergence needs it.

    Args:
        policy: the actor; or a :class:`Reference` of a :class:`~torchrl_lang.transforms.CurrentPolicy`.
        rows: score whole rows.
    """
    if is_wrapper(policy):
        return WrapperReference(CurrentPolicy(language_actor(policy.model)))
    if isinstance(policy, TensorDictModuleBase) and hasattr(policy, "get_dist"):
        policy = CurrentPolicy(policy)
    if isinstance(policy, CurrentPolicy):
        return RowReference(policy) if rows else _of_actor(policy, None, None)
    if not (isinstance(policy, Reference) and isinstance(policy.frozen, CurrentPolicy)):
        raise TypeError(f"policy= is the actor that trains, with get_dist(tensordict); got {type(policy).__name__}.")
    return policy


def _of_actor(
    held: HeldActor,
    in_keys: Sequence[NestedKey] | None,
    action_key: NestedKey | Sequence[NestedKey] | None,
) -> Reference:
    actor = held.actor
    if isinstance(actor, UtteranceActor):
        return UtteranceReference(held, in_keys=in_keys)
    if action_key is None and TOKENS in actor.in_keys and ACTION not in actor.out_keys:
        return RowReference(held)
    return ActorReference(held, in_keys=in_keys, action_key=action_key)
