"""A frozen actor as reference: one action a step, of any distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import GRUModule, LSTMModule

from torchrl_lang.modules.frozen.frozen_copy import CurrentPolicy, HeldActor
from torchrl_lang.schema import FEATURES_MASK, missing_entry
from torchrl_lang.transforms.base import required
from torchrl_lang.transforms.keys import ActionKeys, key_list
from torchrl_lang.transforms.references.base import Reference

__all__ = ["ActorReference", "sum_heads"]

_IS_INIT = "is_init"  # TorchRL's mark of the first step of an episode
_NO_STATE = (
    "Put the transform into the environment, which carries the state; or give it sequences, time last, within "
    "`with set_recurrent_mode(True):`."
)
_REMEDIES = (
    "give the reference's state entries of its own, run it beside the policy, and name the entries that it reads: "
    "ActorReference(frozen_copy(actor), in_keys=[...]); or let the policy write the reference's log-probabilities and "
    "pass ColumnReference(key, spec=...)."
)


class ActorReference(Reference):
    """Any actor with ``get_dist``: continuous, categorical, one-hot, composite.

    The hidden state of an actor with TorchRL's ``GRUModule`` or ``LSTMModule`` is its own, not the policy's: in an
    environment with an ``InitTracker`` the transform carries it from step to step, in entries of its own, from zero at
    each reset. A batch is read step by step where it has that state, or in one pass under TorchRL's
    ``set_recurrent_mode(True)``; a sequence without a state begins with zeros.

    Args:
        frozen: the actor, see :func:`~torchrl_lang.transforms.frozen_copy`.
        in_keys: the entries that it reads, default the actor's own ``in_keys`` but for a hidden state. A hidden state
            that is named here is read from the data and not carried.
        action_key: the key of the action, default as the actor writes it.

    Raises:
        TypeError: the actor has no ``get_dist``.
        ValueError: the actor is recurrent and its state cannot be carried.

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
        read, states = _keys_read(actor), {}
        if not isinstance(frozen, CurrentPolicy):  # which is run on the state with which it acted, in the data
            states = _recurrent_states(actor)
            _refuse_other_states(actor, set(states).union(key_list(in_keys or ())))
        self.in_keys = [key for key in read if key not in states] if in_keys is None else key_list(in_keys)
        self._states = {key: later for key, later in states.items() if key not in self.in_keys}
        if self._states and (len(self._states) < len(states) or _IS_INIT not in self.in_keys):
            raise ValueError(
                f"The reference is recurrent: in_keys={self.in_keys} must have {_IS_INIT!r}, and of the states "
                f"{list(states)} either none, so that they are carried, or all, where they are in the data."
            )

    @property
    def state_keys(self) -> list[NestedKey]:
        """See :class:`Reference`."""
        return [self._own(key) for key in self._states]

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`; heads of a composite action are independent, so their log-probabilities add up."""
        with self.frozen.eval_mode():
            dist = self._step(tensordict, carry)
            if isinstance(dist, CompositeDistribution):
                return sum_heads([head.log_prob(_action(tensordict, name)) for name, head in dist.dists.items()])
            return dist.log_prob(_action(tensordict, self.action_keys.action[0]))

    def distribution(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Distribution:
        """See :class:`Reference`."""
        with self.frozen.eval_mode():
            return self._step(tensordict, carry)

    def _step(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Any:
        """The distribution; a state that was read is followed by the next one."""
        inputs = self.inputs(tensordict)
        sequence = bool(self._states) and _in_one_pass(self.frozen.actor)
        for key in self._states:
            state: Any = tensordict.get(self._own(key), None)
            if state is not None:
                inputs.set(key, state)
            elif not sequence:
                raise missing_entry("The recurrent reference", [self._own(key)], tensordict, _NO_STATE)
        dist = self._dist(inputs)
        if not sequence:
            for key, later in self._states.items():
                carry.set(self._own(key), inputs.get(later))
        return dist

    def state_specs(self, env: EnvBase, specs: Composite) -> dict[NestedKey, TensorSpec]:
        """See :class:`Reference`."""
        step = self.example_step(env, specs)
        values = {key: step.get(key) for key in self.state_keys}
        return {key: Unbounded(value.shape, dtype=value.dtype, device=env.device) for key, value in values.items()}

    def example_step(self, env: EnvBase, specs: Composite) -> TensorDictBase:
        """See :class:`Reference`; with the state at the start of an episode."""
        step = super().example_step(env, specs)
        if self._states:
            if _in_one_pass(self.frozen.actor):
                raise ValueError(
                    "The recurrent reference reads sequences (default_recurrent_mode=True), and an environment gives "
                    "it single steps: pass an actor whose recurrent modules have default_recurrent_mode=False."
                )
            inputs = self.inputs(step)
            with self.frozen.eval_mode():
                self._dist(inputs)  # without a state, TorchRL's modules begin with zeros
            for key, later in self._states.items():
                if inputs.get(later, None) is None:
                    raise ValueError(
                        f"The recurrent reference does not leave its state {later!r} in the tensordict, so it cannot "
                        "be carried: build the actor as a sequence of modules, or " + _REMEDIES
                    )
                step.set(self._own(key), torch.zeros_like(inputs.get(later)))
        return step

    def inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The entries that the actor reads, in a new tensordict, so that its outputs stay out of the data.

        Raises:
            KeyError: one is missing.
        """
        inputs = tensordict.select(*self.in_keys, strict=False).copy()  # copies nested tensordicts, too
        missing = [key for key in self.in_keys if inputs.get(key, None) is None and key != FEATURES_MASK]
        if missing:
            advice = "Keep those entries in the data, or name with in_keys= the entries that the actor needs."
            if _IS_INIT in missing:
                advice += " In an environment put InitTracker() before the transform."
            raise missing_entry("The reference", missing, tensordict, advice)
        return inputs

    def _own(self, key: NestedKey) -> NestedKey:
        return unravel_key((self.state_group, key))

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


def _recurrent_states(actor: TensorDictModuleBase) -> dict[NestedKey, NestedKey]:
    """The states that TorchRL's recurrent modules read, each with the entry of the state that follows."""
    states: dict[NestedKey, NestedKey] = {}
    for cell in actor.modules():
        if isinstance(cell, (GRUModule, LSTMModule)):  # they read value, states, is_init and write value, states
            states |= dict(zip(cell.in_keys[1:], cell.out_keys[1:], strict=False))
    return states


def _refuse_other_states(actor: TensorDictModuleBase, known: set[NestedKey]) -> None:
    written = {key for module in _modules_of(actor) for key in key_list(list(module.out_keys))}
    if states := [key for key in _keys_read(actor) if unravel_key(("next", key)) in written and key not in known]:
        raise ValueError(
            f"The reference is recurrent: its state {states} in the data would be the policy's, not its own, and only "
            "the states of GRUModule and LSTMModule are carried. Use one of those, or " + _REMEDIES
        )


def _in_one_pass(actor: TensorDictModuleBase) -> bool:
    """Whether recurrent modules read sequences now, see TorchRL's ``set_recurrent_mode``."""
    return any(cell.recurrent_mode for cell in actor.modules() if isinstance(cell, (GRUModule, LSTMModule)))


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
