"""References without an actor: log-probabilities stored in the data, and a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase

from torchrl_lang.modules.frozen.frozen_copy import frozen_copy
from torchrl_lang.transforms.base import required
from torchrl_lang.transforms.keys import ActionKeys, key_list
from torchrl_lang.transforms.references.base import Reference

__all__ = ["ColumnReference", "FunctionReference"]


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
        return required("ColumnReference", self.in_keys[0], advice, carry, tensordict)

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`."""
        if self.spec is not None:
            return self.spec.clone()
        observations = specs["full_observation_spec"]
        if self.in_keys[0] not in observations.keys(True, True):
            raise KeyError(
                f"The environment has no entry {self.in_keys[0]!r}. Pass the reference as an actor; or, where the "
                f"policy writes the entry at every step, ColumnReference({self.in_keys[0]!r}, spec=...)."
            )
        return observations[self.in_keys[0]].clone()


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

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """See :class:`Reference`."""
        if self.spec is not None:
            return self.spec.clone()
        try:
            return super().log_prob_spec(env, specs)
        except Exception as error:
            error.add_note(
                "This was a step of zeros, to find the shape of the log-probability. For a function that reads what "
                "the policy writes pass FunctionReference(function, spec=...)."
            )
            raise

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        inputs = (tensordict.select(*self.in_keys) if self.in_keys else tensordict).copy()
        with torch.no_grad():
            log_prob = self.function(inputs)
        if not isinstance(log_prob, Tensor):
            raise TypeError(
                f"A reference function returns the log-probabilities as a tensor, got {type(log_prob).__name__}."
            )
        return log_prob
