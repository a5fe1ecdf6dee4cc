"""A frozen recurrent actor as reference: it keeps a state of its own beside the policy's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec
from torchrl.modules import set_recurrent_mode

from torchrl_lang.transforms.frozen import FrozenActor
from torchrl_lang.transforms.live import LiveActor
from torchrl_lang.transforms.references.actor import ActorReference, action_log_prob

__all__ = ["RecurrentReference", "recurrent_keys"]

_IS_INIT = "is_init"


def recurrent_keys(actor: TensorDictModuleBase) -> list[NestedKey]:
    """Entries that an actor reads and hands to its own next step; none for an actor without memory."""
    return [key for key in actor.in_keys if unravel_key(("next", key)) in actor.out_keys]


class RecurrentReference(ActorReference):
    """A recurrent actor (TorchRL's ``LSTMModule``, ``GRUModule``) as reference.

    What the reference remembers of an episode is not what the policy remembers, so the reference's state is carried
    beside the policy's, under ``("reference", key)``: in an environment from step to step, zero at each reset. The
    environment must declare the policy's state (``actor[0].make_tensordict_primer()``) before this reference. A batch
    with a time dimension last (as rollouts and collectors name it) is read in one pass; there each sequence begins
    with an episode, or with the reference's own state in the data.

    Args:
        frozen: see :class:`ActorReference`.
        in_keys: see :class:`ActorReference`.
        action_key: see :class:`ActorReference`.
    """

    def __init__(
        self,
        frozen: FrozenActor,
        *,
        in_keys: Sequence[NestedKey] | None = None,
        action_key: NestedKey | Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(frozen, in_keys=in_keys, action_key=action_key)
        self.state_keys = recurrent_keys(frozen.actor)
        self._is_policy = isinstance(frozen, LiveActor)
        self.in_keys = [key for key in self.in_keys if key not in self.state_keys]

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        dist = self.distribution(tensordict, carry)
        return action_log_prob(dist, tensordict, self.layout.action)

    def distribution(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Distribution:
        """See :class:`Reference`."""
        inputs = self.inputs(tensordict)
        sequence = bool(tensordict.batch_dims) and tensordict.names[-1] == "time"
        for key in self.state_keys:
            inputs.set(key, self._state(tensordict, key, sequence=sequence))
        if sequence:
            inputs.names = tensordict.names
        with self.frozen.evaluating(), set_recurrent_mode(sequence):
            dist = self._dist(inputs)
        for key in self.state_keys:
            carry.set(own_state(key), inputs.get(unravel_key(("next", key))))
        return dist

    def state_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        """See :class:`Reference`."""
        missing = [key for key in self.state_keys if key not in observation_spec.keys(True, True)]
        if missing:
            raise KeyError(
                f"The environment does not declare the state {missing} of the recurrent reference: append "
                "make_tensordict_primer() of the actor's recurrent module before this transform."
            )
        return {own_state(key): observation_spec[key].clone() for key in self.state_keys}

    def _state(self, tensordict: TensorDictBase, key: NestedKey, *, sequence: bool) -> Tensor:
        own = None if self._is_policy else tensordict.get(own_state(key), None)
        if own is not None:
            return own
        policy = tensordict.get(key, None)
        if policy is not None and self._is_policy:
            return policy  # what it remembered when it acted
        if policy is None:
            raise KeyError(
                f"A recurrent reference needs {own_state(key)!r}, its state, or at the start of an episode the "
                f"policy's {key!r} for its shape; the data has {sorted(map(str, tensordict.keys(True, True)))}."
            )
        begins = tensordict.get(_IS_INIT)
        begins = begins.select(tensordict.batch_dims - 1, 0) if sequence else begins
        if not begins.all():
            raise ValueError(
                "The batch starts in the middle of an episode, where the state of the recurrent reference is unknown. "
                "Put the transform into the environment, which carries the state, or collect whole episodes "
                "(Collector(..., trajs_per_batch=N))."
            )
        return torch.zeros_like(policy)


def own_state(key: NestedKey) -> NestedKey:
    """Where the reference's own state stands beside the policy's."""
    return unravel_key(("reference", key))
