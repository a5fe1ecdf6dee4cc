"""A frozen actor as reference: one action a step, of any distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor
from torch.distributions import Distribution

from torchrl_lang.modules.frozen.current_policy import HeldActor
from torchrl_lang.schema import PREFIX_MASK, missing_entry
from torchrl_lang.transforms.base import required
from torchrl_lang.transforms.keys import ActionKeys, key_list
from torchrl_lang.transforms.references.base import Reference

__all__ = ["ActorReference", "sum_heads"]


class ActorReference(Reference):
    """Any actor with ``get_dist``: continuous, categorical, one-hot, composite.

    Args:
        frozen: the actor, see :func:`~torchrl_lang.transforms.frozen_copy`.
        in_keys: the entries that it reads, default the actor's own ``in_keys``.
        action_key: the key of the action, default as the actor writes it.

    Raises:
        TypeError: the actor has no ``get_dist``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> from torchrl_lang.transforms import ActorReference, frozen_copy
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(net, in_keys=["logits"], distribution_class=torch.distributions.Categorical)
        >>> step = TensorDict(observation=torch.zeros(4, 3), action=torch.zeros(4, dtype=torch.int64), batch_size=[4])
        >>> reference = ActorReference(frozen_copy(actor))
        >>> reference.log_prob(step, step).shape
        torch.Size([4])
    """

    frozen: HeldActor

    def __init__(
        self,
        frozen: HeldActor,
        *,
        in_keys: Sequence[NestedKey] | None = None,
        action_key: NestedKey | Sequence[NestedKey] | None = None,
    ) -> None:
        actor = frozen.actor
        if not hasattr(actor, "get_dist"):
            raise TypeError(
                f"A reference actor needs get_dist(tensordict), which {type(actor).__name__} does not have: pass a "
                "ProbabilisticActor or ProbabilisticTensorDictSequential, or a function of the tensordict."
            )
        self.frozen = frozen
        self.action_keys = _keys_of_actor(actor, action_key)
        self.in_keys = key_list(_keys_read(actor) if in_keys is None else in_keys)

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`; heads of a composite action are independent, so their log-probabilities add up."""
        with self.frozen.eval_mode():
            dist = self._dist(self.inputs(tensordict))
            if isinstance(dist, CompositeDistribution):
                return sum_heads([head.log_prob(_action(tensordict, name)) for name, head in dist.dists.items()])
            return dist.log_prob(_action(tensordict, self.action_keys.action[0]))

    def distribution(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Distribution:
        """See :class:`Reference`."""
        with self.frozen.eval_mode():
            return self._dist(self.inputs(tensordict))

    def inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The entries that the actor reads, in a new tensordict, so that its outputs stay out of the data.

        Raises:
            KeyError: one is missing.
        """
        inputs = tensordict.select(*self.in_keys, strict=False).copy()  # copies nested tensordicts, too
        missing = [key for key in self.in_keys if inputs.get(key, None) is None and key != PREFIX_MASK]
        if missing:
            advice = "Keep those entries in the data, or name with in_keys= the entries that the actor needs."
            raise missing_entry("The reference", missing, tensordict, advice)
        return inputs

    def _dist(self, inputs: TensorDictBase) -> Any:
        actor: Any = self.frozen.actor
        return actor.get_dist(inputs)


def sum_heads(values: Sequence[Tensor]) -> Tensor:
    """Sum over heads of an action; a head with more dimensions than another is summed over those first."""
    ndim = min(value.ndim for value in values)
    flat = [value.flatten(ndim).sum(-1) if value.ndim > ndim else value for value in values]
    return flat[0] if len(flat) == 1 else torch.stack(flat).sum(0)


def _keys_of_actor(actor: TensorDictModuleBase, action_key: NestedKey | Sequence[NestedKey] | None) -> ActionKeys:
    """The keys under which an actor writes its action and its log-probability."""
    heads = [module for module in actor.modules() if isinstance(module, ProbabilisticTensorDictModule)]
    if not heads:
        return ActionKeys.of_action() if action_key is None else ActionKeys.of_action(action_key)
    if not getattr(actor, "return_composite", False):
        heads = heads[-1:]  # of several, get_dist gives the last one's distribution
    actions = [key for head in heads for key in head.dist_sample_keys]
    log_probs = [key for head in heads for key in head.out_keys if key not in head.dist_sample_keys]
    return ActionKeys.of_action(actions if action_key is None else key_list(action_key), log_probs or None)


def _action(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    action = required("The reference", key, "It is the action to score: name it with action_key=.", tensordict)
    # Specs of one-hot and binary actions draw bool, which no distribution can score.
    return action.float() if action.dtype == torch.bool else action


def _keys_read(actor: TensorDictModuleBase) -> list[NestedKey]:
    """The entries that the modules of an actor read and none before them wrote.

    An actor's own ``in_keys`` name the parameters of a composite distribution, which are written in parts.
    """
    written: set[NestedKey] = set()
    keys: list[NestedKey] = []
    for module in _modules_of(actor):
        keys += [key for key in key_list(list(module.in_keys)) if key not in written and key not in keys]
        for key in key_list(list(module.out_keys)):
            written |= {key[:depth] for depth in range(2, len(key) + 1)} | {key[0]} if isinstance(key, tuple) else {key}
    return keys


def _modules_of(actor: TensorDictModuleBase) -> list[TensorDictModuleBase]:
    """The modules of an actor in the order in which they run, without nesting."""
    if not isinstance(actor, TensorDictSequential):
        return [actor]
    return [inner for module in actor.module for inner in _modules_of(module)]
