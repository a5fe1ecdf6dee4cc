"""A reference that is built where it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase

from torchrl_lang.transforms.frozen import FrozenActor
from torchrl_lang.transforms.layout import Layout
from torchrl_lang.transforms.references.base import Reference
from torchrl_lang.transforms.references.choice import as_reference

__all__ = ["LazyReference"]


class LazyReference(Reference):
    """A reference that is built where it runs, at first use: nothing but the factory travels to a worker process.

    Args:
        factory: returns a :class:`Reference`, or an actor or anything else that
            :class:`~torchrl_lang.transforms.ReferenceModelLogProbTransform` takes. Picklable, for workers.
        layout: where everything stands, default one action a step; must be that of what the factory returns.
    """

    def __init__(self, factory: Callable[[], Any], *, layout: Layout | None = None) -> None:
        self.factory = factory
        self.layout = Layout.of_action() if layout is None else layout
        self._built: Reference | None = None

    @property
    def built(self) -> Reference:
        """The reference, built at the first look.

        Raises:
            ValueError: its actions stand elsewhere than ``layout`` says.
        """
        if self._built is None:
            built = as_reference(self.factory())
            if built.layout != self.layout:
                raise ValueError(
                    f"The factory built a reference with {built.layout}, but {self.layout} was announced: pass "
                    "layout= to LazyReference (Layout.of_action(key), Layout.utterance() or Layout.row())."
                )
            self._built = built
        return self._built

    @property
    def frozen(self) -> FrozenActor | None:  # type: ignore[override]
        """The model behind it, which is built for it."""
        return self.built.frozen

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """The entries that it reads."""
        return self.built.in_keys

    def log_prob(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Tensor:
        """See :class:`Reference`."""
        return self.built.log_prob(tensordict, carry)

    def distribution(self, tensordict: TensorDictBase, carry: TensorDictBase) -> Distribution:
        """See :class:`Reference`."""
        return self.built.distribution(tensordict, carry)

    def state_specs(self, observation_spec: Composite) -> dict[NestedKey, TensorSpec]:
        """See :class:`Reference`."""
        return self.built.state_specs(observation_spec)

    def log_prob_spec(self, parent: EnvBase, observation_spec: Composite) -> TensorSpec:
        """See :class:`Reference`."""
        return self.built.log_prob_spec(parent, observation_spec)

    def apply_to_owned(self, function: Callable[[Tensor], Tensor]) -> None:
        """See :class:`Reference`."""
        # Nothing is built only to be moved; the factory makes what it makes where it runs.
        if self._built is not None:
            self._built.apply_to_owned(function)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}
