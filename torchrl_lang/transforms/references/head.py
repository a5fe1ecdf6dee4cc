"""A second head on a trunk that reference and policy share: the trunk's output is read from the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase
from torch import nn
from torch.distributions import Distribution

from torchrl_lang.transforms.fingerprint import defining_weights
from torchrl_lang.transforms.frozen import FrozenActor
from torchrl_lang.transforms.layout import key_list
from torchrl_lang.transforms.references.actor import ActorReference, keys_read, modules_of

__all__ = ["HeadReference"]


class HeadReference(ActorReference):
    """The modules of an actor behind those whose output the policy left in the data.

    The modules before them are frozen and the policy's own, so what they wrote is right for the reference, too, and
    they do not run again: the reference costs one head, in memory and in time.

    Args:
        frozen: the actor, see :func:`~torchrl_lang.transforms.frozen_copy`.
        shared_keys: what the shared modules write, such as ``["hidden"]``; the actor must leave it in the data.
        in_keys: see :class:`ActorReference`; default ``shared_keys`` and whatever else the rest reads.
        action_key: see :class:`ActorReference`.

    Raises:
        ValueError: no module but the first reads ``shared_keys``, or those before it train: have weights with
            gradients, or persistent buffers that a policy in training mode may change (BatchNorm's).

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from torchrl.modules import ProbabilisticActor
        >>> from torchrl_lang.transforms import HeadReference, frozen_copy
        >>> trunk = TensorDictModule(torch.nn.Linear(3, 8), in_keys=["observation"], out_keys=["hidden"])
        >>> head = TensorDictModule(torch.nn.Linear(8, 2), in_keys=["hidden"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(TensorDictSequential(trunk.requires_grad_(False), head), in_keys=["logits"],
        ...                            distribution_class=torch.distributions.Categorical)
        >>> reference = HeadReference(frozen_copy(actor), ["hidden"])
        >>> step = actor(TensorDict(observation=torch.zeros(4, 3), batch_size=[4])).exclude("observation")
        >>> reference.log_prob(step, step).shape
        torch.Size([4])
    """

    def __init__(
        self,
        frozen: FrozenActor,
        shared_keys: Sequence[NestedKey],
        *,
        in_keys: Sequence[NestedKey] | None = None,
        action_key: NestedKey | Sequence[NestedKey] | None = None,
    ) -> None:
        self._begin = _begin(frozen, key_list(list(shared_keys)))
        rest = keys_read(modules_of(frozen.actor)[self._begin :])
        super().__init__(frozen, in_keys=rest if in_keys is None else in_keys, action_key=action_key)

    def _dist(self, inputs: TensorDictBase) -> Distribution:
        actor: Any = self.frozen.actor
        for module in modules_of(actor)[self._begin : -1]:
            inputs = module(inputs)
        return actor.build_dist_from_params(inputs)


def _begin(frozen: FrozenActor, keys: list[NestedKey]) -> int:
    """The number of the first module that runs."""
    modules = modules_of(frozen.actor)
    begin = next((i for i, module in enumerate(modules) if set(keys) & set(module.in_keys)), 0)
    if not begin:
        raise ValueError(f"shared_keys={keys}: no module behind the first one of the actor reads one of them.")
    own = [name for module in modules[:begin] for name, p in module.named_parameters() if not frozen.shares(p)]
    if own:
        raise ValueError(
            f"shared_keys={keys} are written by modules with weights that train ({', '.join(own[:3])}): the reference "
            "would drift with the policy's. Freeze them with requires_grad_(False) before making the frozen copy."
        )
    drifting = [name for module in modules[:begin] for name in _buffers(module, frozen)]
    if drifting:
        raise ValueError(
            f"shared_keys={keys} are written by modules with buffers ({', '.join(drifting[:3])}) which the policy may "
            "change while it trains, as BatchNorm does: what it wrote would be wrong for the reference. Use a trunk "
            "without running statistics, or the whole actor as reference; constants can be registered with "
            "persistent=False or be parameters with requires_grad=False."
        )
    return begin


def _buffers(module: nn.Module, frozen: FrozenActor) -> list[str]:
    """Names of persistent buffers; not of the policy's own ones, which the frozen actor watches."""
    parameters = {id(parameter) for parameter in module.parameters()}
    return [name for name, t in defining_weights(module) if id(t) not in parameters and not frozen.shares(t)]
