"""The interface of references: the log-probability of an action under the policy that training stays close to."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_lang.modules.frozen.frozen_copy import HeldActor
from torchrl_lang.transforms.keys import ActionKeys

__all__ = ["Reference"]


class Reference(ABC):
    """Gives the log-probability of taken actions. It is no module, so that its weights are in no ``parameters()``.

    Attributes:
        action_keys: the key of the action, and the default keys of what belongs to it.
        in_keys: the entries that it reads, beside the action.
        frozen: its model; None where there is none to move, to save or to fingerprint.
        state_group: where a recurrent reference keeps its state in the data.
    """

    action_keys: ActionKeys
    in_keys: list[NestedKey]
    frozen: HeldActor | None = None
    state_group: str = "reference_state"
    _why_no_env: str | None = None  # the error where a reference cannot score the steps of an environment

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
        raise TypeError(
            f"{type(self).__name__} gives log-probabilities only, and an exact divergence needs the reference's whole "
            "distribution: pass the reference as an actor, or use an estimator (estimator='k3')."
        )

    def log_prob_spec(self, env: EnvBase, specs: Composite) -> TensorSpec:
        """Spec of the log-probability in an environment, found by scoring one random action.

        Args:
            env: the environment; its action spec is used.
            specs: its output specs at the transform's place of the chain.

        Raises:
            ValueError: this kind of reference does not score single steps, or it keeps a state outside the tensordict.
        """
        if self._why_no_env is not None:
            raise ValueError(self._why_no_env)
        step = self.example_step(env, specs)
        with torch.no_grad():
            log_prob, again = self.log_prob(step, step.copy()), self.log_prob(step, step.copy())
        if not torch.allclose(log_prob, again, rtol=1e-4, atol=1e-4, equal_nan=True):
            raise ValueError(
                "The reference gives the same step another log-probability when asked again: it is random, or it "
                "keeps a state outside the tensordict, which no reset clears. Use TorchRL's GRUModule or LSTMModule, "
                "or let the policy write the reference's log-probabilities and pass ColumnReference(key, spec=...)."
            )
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
