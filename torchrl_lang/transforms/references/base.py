"""References: what can say how likely an action is under the policy that one is kept near."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from torchrl_lang.modules.frozen.frozen_copy import FrozenActor
from torchrl_lang.transforms.keys import ActionKeys

__all__ = ["Reference"]


class Reference(ABC):
    """Gives the log-probability of taken actions. Not a module: what it holds never shows up in ``parameters()``.

    Attributes:
        action_keys: where it looks for the action, and where what belongs to the action stands by default.
        in_keys: the entries that it reads, beside the action.
        frozen: the model behind it; None where there is none to move, to embed or to recognise.
    """

    action_keys: ActionKeys
    in_keys: list[NestedKey]
    frozen: FrozenActor | None = None

    @abstractmethod
    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """Log-probability of the actions in ``tensordict``, which is left as it was.

        Args:
            tensordict: the data of the actions, ``[*B]``.
            carry: where the transform writes, ``"next"`` of steps; a column of log-probabilities is looked for there.
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

    def log_prob_spec(self, parent: EnvBase, observation_spec: Composite) -> TensorSpec:
        """Spec of the log-probability in an environment, found by scoring one made-up step."""
        step = self.made_up_step(parent, observation_spec)
        with torch.no_grad():
            log_prob = self.log_prob(step, step.copy())
        return Unbounded(log_prob.shape, dtype=log_prob.dtype, device=observation_spec.device)

    def made_up_step(self, parent: EnvBase, observation_spec: Composite) -> TensorDictBase:
        """Data of a step with the shapes of the environment, zeros but for a random action."""
        device = observation_spec.device
        devices = [] if device is None or device.type != "cuda" else [device]
        with torch.random.fork_rng(devices=devices):  # zeros need not be an action; nobody's random stream moves
            step = parent.fake_tensordict().exclude("next")
            step.update(parent.full_action_spec.rand())
        return step

    def apply_to_owned(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move or convert the weights that are the reference's own."""
        if self.frozen is not None:
            self.frozen.apply_to_owned(function)
