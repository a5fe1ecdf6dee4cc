"""References: actors, columns and functions that give the log-probability of an action for a KL penalty."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import Actor, Delta, GRUModule, LSTMModule, TanhDelta

from torchrl_lang.modules.frozen.frozen_copy import CurrentPolicy, HeldActor, frozen_copy
from torchrl_lang.schema import FEATURES_MASK, find_entry, missing_entry
from torchrl_lang.transforms.base import ActionKeys, key_list

_IS_INIT = "is_init"  # TorchRL's mark of the first step of an episode
_NO_STATE = (
    "Put the transform into the environment, which carries the state; or give it sequences, time last, within "
    "`with set_recurrent_mode(True):`."
)
_REMEDIES = (
    "Use TorchRL's GRUModule or LSTMModule in a sequence of modules; or give the reference's state entries of its own, "
    "run it beside the policy, and pass ActorReference(frozen_copy(actor), in_keys=[...]); or let the policy write the "
    "reference's log-probabilities and pass ColumnReference(key, spec=...)."
)


class Reference(ABC):
    """Gives the log-probability of taken actions. It is no module, so that its weights are in no ``parameters()``.

    Attributes:
        action_keys: the key of the action, and the default keys of what belongs to it.
        in_keys: the entries that it reads, beside the action.
        frozen: its model; None where there is none to move, to save or to fingerprint.
        state_group: where a recurrent reference keeps its state in the data.
        spec: in an environment, the spec of the log-probability; None to find it.
    """

    action_keys: ActionKeys
    in_keys: list[NestedKey]
    frozen: HeldActor | None = None
    state_group: str = "reference_state"
    spec: TensorSpec | None = None

    @property
    def state_keys(self) -> list[NestedKey]:
        """The entries of its own state, which it reads at one step and writes for the next; none without memory."""
        return []

    @abstractmethod
    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """Log-probability of the actions in ``tensordict``, which is left as it was.

        Args:
            tensordict: the data of the actions, ``[*B]``.
            carry: where the transform writes, ``"next"`` of steps; stored log-probabilities are looked up there first,
                and ``state_keys`` are written there.
        """

    def distribution(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Distribution:
        """The distribution of the action, for exact divergences.

        Raises:
            TypeError: this kind of reference has none.
        """
        raise TypeError(f"{type(self).__name__} has no distribution: use an estimator (estimator='k3').")

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """Spec of the log-probability in an environment, found by scoring one random action.

        Args:
            env: the environment; its action spec is used.
            specs: its output specs at the transform's place of the chain.

        Raises:
            ValueError: this kind of reference does not score single steps, or it keeps a state outside the tensordict.
        """
        if self.spec is not None:
            return self.spec.clone()
        step = self.example_step(env, specs)
        with torch.no_grad():
            log_prob, again = self.log_prob(step, step.copy()), self.log_prob(step, step.copy())
        if not torch.allclose(log_prob, again, rtol=1e-4, atol=1e-4, equal_nan=True):
            raise ValueError(f"The reference is random, or keeps a state outside the tensordict. {_REMEDIES}")
        return Unbounded(log_prob.shape, dtype=log_prob.dtype, device=env.device)

    def state_specs(self, env: EnvBase, specs: Composite) -> dict[NestedKey, TensorSpec]:
        """Specs of ``state_keys``; arguments as of :meth:`log_prob_spec`."""
        return {}

    def example_step(self, env: EnvBase, specs: Composite) -> TensorDictBase:
        """A step of zeros with a random action; the global random stream is left as it was."""
        step = specs["full_observation_spec"].zero()
        step.update(specs["full_done_spec"].zero()).update(env.full_state_spec.zero())
        with torch.random.fork_rng(devices=[env.device] if str(env.device).startswith("cuda") else []):
            return step.update(env.full_action_spec.rand())


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
        TypeError: the actor gives its actions no probability: it has no ``get_dist``, or a deterministic one.
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
        self.frozen = frozen
        heads = _heads(actor)
        kinds = [head.distribution_class for head in heads]  # a class or a function
        deterministic = any(isinstance(kind, type) and issubclass(kind, (Delta, TanhDelta)) for kind in kinds)
        if isinstance(actor, Actor) or not hasattr(actor, "get_dist") or deterministic:
            advice = "use TorchRL's ProbabilisticActor, or a function of the tensordict that returns log-probabilities"
            raise TypeError(f"{type(actor).__name__} has no distribution of actions to diverge from: {advice}.")
        self.action_keys = _keys_of_actor(heads, action_key)
        read, states = _keys_read(actor), {}
        if not isinstance(frozen, CurrentPolicy):  # which is run on the state with which it acted, in the data
            states = _recurrent_states(actor)
            if others := _other_states(actor, set(states).union(key_list(in_keys or ()))):
                raise ValueError(f"The reference is recurrent, and its state {others} is not carried. {_REMEDIES}")
        self.in_keys = [key for key in read if key not in states] if in_keys is None else key_list(in_keys)
        self._states = {key: later for key, later in states.items() if key not in self.in_keys}
        if self._states and (len(self._states) < len(states) or _IS_INIT not in self.in_keys):
            needed = f"{_IS_INIT!r} and all of its state {[*states]}, or none of it, which is then carried"
            raise ValueError(f"A recurrent reference reads {needed}, got in_keys={self.in_keys}.")

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
                raise ValueError("An environment gives single steps: use default_recurrent_mode=False.")
            inputs = self.inputs(step)
            with self.frozen.eval_mode():
                self._dist(inputs)  # without a state, TorchRL's modules begin with zeros
            for key, later in self._states.items():
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


def _heads(actor: TensorDictModuleBase) -> list[ProbabilisticTensorDictModule]:
    """The modules of an actor that have the distributions of its actions."""
    heads = [module for module in actor.modules() if isinstance(module, ProbabilisticTensorDictModule)]
    # Of several, get_dist gives the last one's distribution.
    return heads if getattr(actor, "return_composite", False) else heads[-1:]


def _keys_of_actor(
    heads: list[ProbabilisticTensorDictModule], action_key: NestedKey | Sequence[NestedKey] | None
) -> ActionKeys:
    """The keys under which an actor writes its action and its log-probability."""
    if not heads:
        return ActionKeys.of_action() if action_key is None else ActionKeys.of_action(action_key)
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


def _other_states(actor: TensorDictModuleBase, known: set[NestedKey]) -> list[NestedKey]:
    """The states that other modules read from the step before; in the data they would be the policy's."""
    written = {key for module in _modules_of(actor) for key in key_list(list(module.out_keys))}
    return [key for key in _keys_read(actor) if unravel_key(("next", key)) in written and key not in known]


def _in_one_pass(actor: TensorDictModuleBase) -> bool:
    """Whether recurrent modules read sequences now, see TorchRL's ``set_recurrent_mode``."""
    return any(cell.recurrent_mode for cell in actor.modules() if isinstance(cell, (GRUModule, LSTMModule)))


def _action(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    rows = "To score whole rows of tokens pass RowReference(frozen_copy(actor))."
    advice = f"It is the action to score: name it with action_key=. {rows}"
    action = find_entry("The reference", key, advice, tensordict)
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


class ColumnReference(Reference):
    """Log-probabilities that the data holds already, such as those stored once for an offline dataset.

    Args:
        key: their entry. On steps it is looked up under ``"next"`` first, where this library writes what belongs to an
            action; in an environment the entry at the root belongs to the step before.
        action_keys: the other keys, default those of one action a step.
        spec: in an environment: the spec of an entry that the policy writes and the environment does not know, e.g.
            ``Unbounded(env.batch_size)``.
    """

    def __init__(
        self, key: NestedKey, *, action_keys: ActionKeys | None = None, spec: TensorSpec | None = None
    ) -> None:
        self.in_keys = key_list(key)
        self.spec = spec
        self.action_keys = action_keys or ActionKeys.of_action()

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        advice = "It should hold the reference's log-probabilities, computed beforehand."
        return find_entry("ColumnReference", self.in_keys[0], advice, carry, tensordict)

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`."""
        if self.spec is not None:
            return self.spec.clone()
        observations = specs["full_observation_spec"]
        advice = "If the policy writes it, give spec=."
        return find_entry("The environment's ColumnReference", self.in_keys[0], advice, observations).clone()


class FunctionReference(Reference):
    """A function of the tensordict that returns the log-probability of its actions; called without gradients.

    Args:
        function: ``tensordict -> log_prob``. Of a module a frozen copy is made, see
            :func:`~torchrl_lang.transforms.frozen_copy`. A plain function is called as it is: a model that it calls
            must be frozen and must not be the policy, or the reference trains with it, and a ``state_dict`` has no
            fingerprint of it.
        in_keys: the entries that it gets, default all.
        action_keys: the keys of the action and its entries, default those of one action a step.
        spec: in an environment: the spec of the log-probability; by default the function is tried on a step of zeros,
            which has no entries that only the policy writes.
    """

    def __init__(
        self,
        function: Callable[[TensorDictBase], Tensor],
        *,
        in_keys: Sequence[NestedKey] = (),
        action_keys: ActionKeys | None = None,
        spec: TensorSpec | None = None,
    ) -> None:
        if isinstance(function, nn.Module):
            self.frozen = frozen_copy(function)
        self.function = function if self.frozen is None else self.frozen.actor
        self.in_keys = key_list(in_keys) if in_keys else []
        self.action_keys = action_keys or ActionKeys.of_action()
        self.spec = spec

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        inputs = (tensordict.select(*self.in_keys) if self.in_keys else tensordict).copy()
        with torch.no_grad():
            return self.function(inputs)
